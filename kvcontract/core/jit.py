"""Compiled kernels: one decorator, and numba stays unloaded until a kernel is first called.

A kernel is a plain function over numpy arrays, compiled with `numba.njit(nogil=True, cache=True)`.
The decorator differs from numba's own in four ways:

- numba is imported at the first call, so importing a module that defines kernels costs nothing;
- where the cache folder cannot be written, the kernel compiles without a cache instead of failing;
- with `NUMBA_DISABLE_JIT=1` the same function runs as Python, with wrap-around integers silenced;
- each kernel brings sample arguments, so `warm_up` can compile all of them before traffic arrives.

A kernel is compiled for one set of argument types: pass writable, C-contiguous arrays of fixed dtypes.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from kvcontract.contract.errors import require

P = ParamSpec("P")
R = TypeVar("R")

_REGISTRY: list[Kernel[..., Any]] = []
_BUILD_LOCK = threading.Lock()


class Kernel(Generic[P, R]):
    """A function that compiles itself at its first call.

    Attributes:
        function: the undecorated Python function.
        cached: whether compiled code is kept on disk; None before the first call and without the JIT.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        helpers: tuple[Callable[..., Any], ...],
        sample: Callable[[], tuple[Any, ...]],
    ) -> None:
        self.function = function
        self.cached: bool | None = None
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self._helpers = helpers
        self._sample = sample
        self._call: Callable[..., R] = self._first_call

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel; the first call compiles it.

        Raises:
            MissingExtra: numba is not installed.
        """
        return self._call(*args, **kwargs)

    def warm_up(self) -> None:
        """Compile by running the sample arguments."""
        self(*self._sample())  # type: ignore[call-arg]

    def _first_call(self, *args: Any) -> R:
        with _BUILD_LOCK:
            if self._call == self._first_call:
                self._call = self._build(cache=True)
        try:
            return self._call(*args)
        except OSError:
            # Saving to the cache failed after compiling and before running: compile once more without it.
            if not self.cached:
                raise
            with _BUILD_LOCK:
                self._call = self._build(cache=False)
            return self._call(*args)

    def _build(self, *, cache: bool) -> Callable[..., R]:
        numba = require("numba", "runtime")
        if numba.config.DISABLE_JIT:
            return _silenced(self.function)
        function = self._with_compiled_helpers(numba)
        if cache:
            try:
                compiled: Callable[..., R] = numba.njit(nogil=True, cache=True)(function)
            except (RuntimeError, OSError):  # no folder numba may write its cache to
                cache = False
        if not cache:
            compiled = numba.njit(nogil=True)(function)
        self.cached = cache
        return compiled

    def _with_compiled_helpers(self, numba: types.ModuleType) -> Callable[P, R]:
        """The function with its helpers compiled; helpers live in the same file, or the cache goes stale."""
        source = self.function
        if not self._helpers:
            return source
        compiled: dict[str, Any] = {}
        for helper in self._helpers:  # in order: a helper may call those before it
            compiled[helper.__name__] = numba.njit(nogil=True)(_rebound(helper, compiled))
        return _rebound(source, compiled)


def kernel(
    *, sample: Callable[[], tuple[Any, ...]], helpers: tuple[Callable[..., Any], ...] = ()
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Mark a function as a compiled kernel.

    Args:
        sample: gives small arguments of the right types; `warm_up` calls the kernel with them.
        helpers: plain functions of the same module that the kernel calls.
    """

    def wrap(function: Callable[P, R]) -> Kernel[P, R]:
        made = Kernel(function, helpers=helpers, sample=sample)
        _REGISTRY.append(made)
        return made

    return wrap


def kernels() -> tuple[Kernel[..., Any], ...]:
    """Every kernel of the modules imported so far, in order of definition."""
    return tuple(_REGISTRY)


def warm_up() -> int:
    """Compile every kernel of the modules imported so far; returns how many there are.

    Raises:
        MissingExtra: numba is not installed.
    """
    for each in kernels():
        each.warm_up()
    return len(_REGISTRY)


def _silenced(function: Callable[..., R]) -> Callable[..., R]:
    """Run as Python: kernels rely on unsigned wrap-around, which numpy scalars would warn about."""

    def run(*args: Any) -> R:
        with np.errstate(over="ignore"):
            return function(*args)

    return run


def _rebound(function: Callable[P, R], names: dict[str, Any]) -> Callable[P, R]:
    """The same code, seeing some globals under other values."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"a kernel is a plain function, not {function!r}")
    clone = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    clone.__qualname__ = function.__qualname__
    clone.__module__ = function.__module__
    return clone
