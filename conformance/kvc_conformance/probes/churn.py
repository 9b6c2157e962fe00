"""Engines in threads over one store: what a single one never meets."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.store import RANK, Arguments, Arrays, Made, made_of
from kvcontract.contract.model import Scope
from kvcontract.pool.checkpoints import Checkpoints
from kvcontract.pool.request import RequestKv, admit
from kvcontract.store.policy import ResolvePolicy


def run(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Engines in threads over one store: prompts of shared ``families``, short deadlines among long ones.

    Arguments: ``families``, ``threads``, ``rounds``, ``seed``, ``granule``, ``stops``.
    Returns how many of what came about.
    """
    del arrays
    made, counts, errors = made_of(session, arguments), Counter[str](), list[BaseException]()

    def engine(number: int) -> None:
        rng = np.random.default_rng([arguments["seed"], number])
        try:
            for turn in range(arguments["rounds"]):
                _turn(made, rng, arguments, counts)
                if turn % 8 == number:
                    made.pool.set_retention(False)
                    made.pool.set_retention(True)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            errors.append(error)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(arguments["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return Message(dict(counts))


def _turn(made: Made, rng: np.random.Generator, arguments: Arguments, counts: Counter[str]) -> None:
    families: list[list[int]] = arguments["families"]
    family = families[int(rng.integers(len(families)))]
    tokens = family[: 1 + int(rng.integers(len(family)))]
    deadline_s = 0.0003 if rng.random() < 0.3 else 10.0  # noqa: PLR2004 - some loads are abandoned
    prefix = made.store.resolve(RANK, tokens, policy=ResolvePolicy(deadline_s))
    counts["hits"] += prefix.hit_tokens > 0
    answer = admit(
        made.pool,
        prompt_tokens=tokens,
        max_new_tokens=1,
        keyer=made.store.keyer,
        scope=Scope(),
        prefix=prefix,
        checkpoints=Checkpoints(arguments["granule"], tuple(arguments["stops"])),
    )
    if not isinstance(answer, RequestKv):
        prefix.release()
        counts["postponed"] += 1
        return
    counts["requests"] += 1
    while answer.committed_tokens < answer.prompt_len:
        chunk = answer.schedule_prefill(1 + int(rng.integers(8)))
        answer.apply_prefill(chunk, 0 if chunk.emits else None)
        made.store.seal(answer)
    made.store.retire(answer)
