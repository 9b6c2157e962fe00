"""What tests of a running engine share: a tier that can be held back, an engine over it, adapters."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, Tiny
from torch import Tensor, nn

from kvcontract.core.lane import ThreadLane
from kvcontract.core.pending import Pending
from kvcontract.engine.build import Assembly, EngineLimits, assemble
from kvcontract.engine.engine import Engine
from kvcontract.tiers.base import Buffers, Code, RecordKeys, SaveClass
from kvcontract.tiers.dram import DramTier

PAGE = 16
WAIT_S = 30.0


class Gated:
    """A tier whose answers to look-ups, and whose saves, can be held back; otherwise the tier it wraps."""

    def __init__(self, tier: DramTier) -> None:
        self._tier = tier
        self._held: list[tuple[Pending[Any], Pending[Any]]] = []
        self.shut = False
        self.saves_shut = False
        self.sheds = False

    def __getattr__(self, name: str) -> Any:
        if name in {"reserve", "borrow"}:  # memory that is lent would go around the gate
            raise AttributeError(name)
        return getattr(self._tier, name)

    def lookup(self, keys: RecordKeys, deadline: float) -> Pending[Any]:
        """The tier's answer, when the gate is open."""
        answer = self._tier.lookup(keys, deadline)
        return self._late(answer) if self.shut else answer

    def save(
        self, keys: RecordKeys, buffers: Buffers, cls: SaveClass, deadline: float, **more: Any
    ) -> Pending[Any]:
        """The tier's answer, when the gate is open; or that it has not tried."""
        if self.sheds:
            return Pending.of(np.full(len(keys), Code.SHED, np.uint8))
        answer = self._tier.save(keys, buffers, cls, deadline, **more)
        return self._late(answer) if self.saves_shut else answer

    def open(self) -> None:
        """Let everything through, now and later."""
        self.shut = self.saves_shut = False
        held, self._held = self._held, []
        for answer, late in held:
            answer.on_done(late.settle)

    def _late(self, answer: Pending[Any]) -> Pending[Any]:
        late: Pending[Any] = Pending()
        self._held.append((answer, late))
        return late


@contextmanager
def assembled(
    case: Tiny, *, pages: int = 31, gate: bool = False, tier: bool = True, **more: Any
) -> Iterator[tuple[Assembly, Any]]:
    """An engine with a DRAM tier; afterwards the books balance, and nothing is held, promised or waiting."""
    with ExitStack() as stack:
        lane = ThreadLane("test-dram")
        stack.callback(lane.close, 10.0)
        dram = DramTier(64 << 20, lane=lane)
        below: Any = Gated(dram) if gate else dram
        more.setdefault("limits", EngineLimits(max_chunk_tokens=PAGE))
        parts = assemble(
            case.kv, case.layers, hf_model=case.model, pages=pages, tiers=[below] if tier else [], **more
        )
        with parts:
            yield parts, below
        if not tier:
            dram.close(math.inf)
        parts.pool.check_books()
        gauges = parts.pool.gauges()
        assert (gauges.available, gauges.entitled) == (pages - 1, 0)
        assert parts.engine.idle
        assert not any(parts.engine.gauges().values())


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def until(engine: Engine, condition: Callable[[], object]) -> None:
    """Step until something holds; fails if it does not come to that."""
    ends = time.monotonic() + WAIT_S
    while not condition():
        engine.step()
        assert time.monotonic() < ends, engine.gauges()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait, without stepping, until something holds that another thread does."""
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends


def settle(engine: Engine) -> None:
    """Wait until every prefix is known, so that the next step is the same each time."""
    wait_for(lambda: not engine.gauges()["resolving"])


# Adapters

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def write_adapter(
    folder: Path, model: nn.Module, seed: int, *, rank: int = 4, alpha: float = 8.0, **config: Any
) -> Path:
    """A LoRA of seeded random weights in the layout of PEFT, strong enough to change what is sampled."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "small",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": TARGETS,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "inference_mode": True,
        "init_lora_weights": True,
        **config,
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            key = f"base_model.model.{name}.lora_"
            down = torch.randn(rank, module.in_features, generator=generator) / math.sqrt(module.in_features)
            up = torch.randn(module.out_features, rank, generator=generator) / math.sqrt(rank)
            tensors |= {f"{key}A.weight": down, f"{key}B.weight": 0.4 * up}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: nn.Module, folder: Path) -> nn.Module:
    """The oracle: a copy of the model whose weights are W + s B A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    made = copy.deepcopy(model)
    for name, module in made.named_modules():
        key = f"base_model.model.{name}.lora_"
        if f"{key}A.weight" in tensors and isinstance(module, nn.Linear):
            change = tensors[f"{key}B.weight"].double() @ tensors[f"{key}A.weight"].double()
            module.weight.data = (module.weight.double() + scale * change).to(module.weight.dtype)
    return made


def greedy(model: Any, tokens: list[int], new: int) -> tuple[tuple[int, ...], Tensor]:
    """What an unmodified model gives, each step from scratch: tokens, and the logits [new, vocab]."""
    found, rows = list(tokens), []
    for _ in range(new):
        with torch.no_grad():
            rows.append(model(input_ids=torch.tensor([found])).logits[0, -1])
        found.append(int(rows[-1].argmax()))
    return tuple(found[len(tokens) :]), torch.stack(rows)
