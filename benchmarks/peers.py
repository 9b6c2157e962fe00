"""vLLM's and SGLang's own prefix caches, from their wheels, without a GPU and without their dependencies.

The wheels go into a scratch environment inside the clone, `.bench-venv`, and are imported from there after
everything of ours, so that torch, numpy and the rest are the ones we run with.  The timed code is theirs,
unmodified.  What it imports and never calls is left blank where importing it would need a GPU: SGLang's
package root, its device pools and its kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import subprocess
import sys
import time
import types
import venv
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch  # first: SGLang's Rust core links against it

FOLDER = Path(__file__).parents[1] / ".bench-venv"
VLLM, SGLANG = "0.33.0", "0.5.23"
LIGHT = (  # what their modules import at once, each with its own dependencies
    *("aiohttp", "cachetools", "cbor2", "cloudpickle", "fastapi", "msgspec", "openai", "openai-harmony"),
    *("opentelemetry-api", "orjson", "partial-json-parser", "pillow", "prometheus-client", "psutil"),
    *("py-cpuinfo", "pybase64", "pyzmq", "requests", "uvloop"),
)
ALONE = ("apache-tvm-ffi", "llguidance", "xgrammar")  # and these without, as theirs are large
_STAMP = f"vllm {VLLM}, sglang {SGLANG}"

_BLANK = (
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.kvcache",
    "sglang.kernels.ops.kvcache.mla_buffer",
    "sglang.srt.disaggregation",
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.runtime_context",
    "sglang.srt.utils",
)


class NoPeer(Exception):
    """A peer cannot be measured here; the message says why."""


def site_packages() -> Path:
    """Install the wheels if they are not there; where they are.

    Raises:
        NoPeer: what pip said.
    """
    python = FOLDER / "bin" / "python"
    folder = FOLDER / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    stamp = FOLDER / "stamp"
    if stamp.exists() and stamp.read_text() == _STAMP:
        return folder
    print(f"installing {_STAMP} into {FOLDER} (about 1 GiB)", file=sys.stderr)
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
    alone = ["--no-deps", f"vllm=={VLLM}", f"sglang=={SGLANG}", *ALONE]
    for arguments in (alone, list(LIGHT)):
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
        if done.returncode:
            raise NoPeer(f"pip install: {done.stderr.strip().splitlines()[-1]}")
    stamp.write_text(_STAMP)
    return folder


class Vllm:
    """vLLM's `KVCacheManager` and `BlockPool` over one group of full attention.

    Args:
        pages: usable blocks.
        page_tokens: tokens of a block.

    Raises:
        NoPeer: it cannot be installed or imported.
    """

    version = VLLM

    def __init__(self, pages: int, page_tokens: int) -> None:
        folder = str(site_packages())
        if folder not in sys.path:
            sys.path.append(folder)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            interface = importlib.import_module("vllm.v1.kv_cache_interface")
            utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
            manager = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
            sha256 = importlib.import_module("vllm.utils.hashing").sha256
            self._request = importlib.import_module("vllm.v1.request").Request
            sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        except Exception as error:
            raise NoPeer(f"vllm {VLLM} does not import: {error!r}") from error
        utils.init_none_hash(sha256)
        group = interface.FullAttentionSpec(
            block_size=page_tokens, num_kv_heads=1, head_size=1, dtype=torch.float16
        )
        config = interface.KVCacheConfig(
            num_blocks=pages + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], group)],
        )
        self.manager = manager(
            config,
            max_model_len=pages * page_tokens,
            scheduler_block_size=page_tokens,
            hash_block_size=page_tokens,
        )
        self.pool = self.manager.block_pool
        self.page_tokens = page_tokens
        self.hasher = utils.get_request_block_hasher(page_tokens, sha256)
        self._sampling = sampling(max_tokens=1)
        self._number = 0

    def request(self, tokens: list[int]) -> Any:
        """A request that is not hashed yet."""
        self._number += 1
        return self._request(str(self._number), tokens, self._sampling, None)

    def hashed(self, tokens: list[int]) -> Any:
        """A request with its block hashes."""
        made = self.request(tokens)
        made.block_hashes.extend(self.hasher(made))
        return made

    def register(self, request: Any, blocks: list[Any]) -> None:
        """Name blocks."""
        self.pool.cache_full_blocks(request, blocks, 0, len(blocks), self.page_tokens, 0)

    def fill(self, tokens: list[int]) -> None:
        """Leave a prompt cached."""
        request = self.hashed(tokens)
        blocks = self.pool.get_new_blocks(len(tokens) // self.page_tokens)
        self.register(request, blocks)
        self.pool.free_blocks(reversed(blocks))


class Sglang:
    """SGLang's radix caches, the Python one and the Rust core, holding one long prompt in many nodes.

    Args:
        tokens: the prompt.
        page_tokens: tokens of a page.
        nodes: nodes that the prompt's path has, from branches that leave it.

    Raises:
        NoPeer: it cannot be installed or imported.
    """

    version = SGLANG

    def __init__(self, tokens: Sequence[int], page_tokens: int, nodes: int) -> None:
        self.key = array("q", tokens)
        self._python, self._rust = _import_sglang()
        self._base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self.tree = self._python.RadixCache.create_simulated(page_size=page_tokens)
        init = self._rust.TreeCoreInitParamsBinding(
            page_size=page_tokens, eviction_policy="lru", device="cpu"
        )
        self.core = self._rust.RustUnifiedTreeCoreBinding(init, [0])
        step = len(self.key) // page_tokens // nodes * page_tokens
        self._insert(self.key)
        for end in range(step, len(self.key), step):
            self._insert(self.key[:end] + array("q", [random.randrange(10**6) for _ in range(page_tokens)]))

    def match_python(self) -> float:
        """Seconds of one match of all tokens, and the lock that keeps it."""
        start = time.perf_counter()
        key = self._python.RadixKey(self.key)
        found = self.tree.match_prefix(self._base.MatchPrefixParams(key=key))
        self.tree.inc_lock_ref(found.last_device_node)
        seconds = time.perf_counter() - start
        self._expect(found.device_prefix_len)
        self.tree.dec_lock_ref(found.last_device_node)
        return seconds

    def match_rust(self) -> float:
        """The same on the Rust core."""
        start = time.perf_counter()
        found = self.core.match_prefix(self._rust.MatchParamsBinding(key=self.key))
        seconds = time.perf_counter() - start
        self._expect(found.device_prefix_len)
        return seconds

    def _insert(self, key: array[int]) -> None:
        value = torch.arange(len(key))
        self.tree.insert(self._base.InsertParams(key=self._python.RadixKey(key), value=value))
        self.core.insert(self._rust.InsertParamsBinding(key=key, value=value))

    def _expect(self, hit: int) -> None:
        if hit != len(self.key):
            raise RuntimeError(f"sglang matched {hit} of {len(self.key)} tokens")


class _Blank(types.ModuleType):
    """A module whose every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _import_sglang() -> tuple[Any, Any]:
    """The Python module and the Rust one."""
    folder = site_packages()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    if "sglang" not in sys.modules:
        root = types.ModuleType("sglang")
        root.__path__ = [str(folder / "sglang")]
        sys.modules["sglang"] = root
        sys.modules.update({name: _Blank(name) for name in _BLANK})
        common = types.ModuleType("sglang.srt.utils.common")
        common.ceil_align = lambda value, size: -(-value // size) * size  # type: ignore[attr-defined]
        sys.modules[common.__name__] = common
    try:
        radix_cache = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        name = "sglang.srt.mem_cache.rust_tree_core.mem_cache"
        if name not in sys.modules:
            file = next((folder / "sglang/srt/mem_cache/rust_tree_core").glob("mem_cache.*.so"))
            spec = importlib.util.spec_from_file_location(name, file)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            sys.modules[name] = module
    except Exception as error:
        raise NoPeer(f"sglang {SGLANG} does not import without a GPU: {error!r}") from error
    return radix_cache, sys.modules[name]
