"""Copies between addresses, queued on a stream: the few calls of the CUDA driver that torch has no name for.

Torch copies tensors, one call each; a batch of pages is hundreds of addresses.  The driver takes arrays of
them in one call, with the GIL released.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcontract.contract.errors import EnvironmentFault
from kvcontract.memory.host import joined

LONG_BYTES: Final = 2**20
"""Copies of this length gain nothing by being one."""

_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_ATTRIBUTES: Final = (_STREAM_ORDER, 0, 0, 0, 0, 0)  # order, hints of both sides, flags


class Driver:
    """The driver of this machine.

    Attributes:
        batched: whether it takes many copies in one call.

    Raises:
        EnvironmentFault: there is none.
    """

    def __init__(self) -> None:
        try:
            self._lib: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise EnvironmentFault(f"the CUDA driver cannot be loaded: {error}") from error
        self._batch = getattr(self._lib, "cuMemcpyBatchAsync_v2", None)
        self._old_batch = None if self._batch else getattr(self._lib, "cuMemcpyBatchAsync", None)
        self.batched = bool(self._batch or self._old_batch)
        self._attributes = (ctypes.c_int * len(_ATTRIBUTES))(*_ATTRIBUTES)
        self._first = (ctypes.c_size_t * 1)(0)
        self._lib.cuMemcpyAsync.argtypes = (
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )

    def copy(
        self,
        target: NDArray[np.int64],
        source: NDArray[np.int64],
        size_bytes: NDArray[np.int64],
        stream: int,
        *,
        batched: bool = True,
    ) -> int:
        """Queue copies on a stream; short neighbours are joined first.

        Args:
            target: int64[n], addresses in memory of a device or of the host.
            source: int64[n], likewise.
            size_bytes: int64[n].
            stream: its handle; not the default stream.
            batched: in one call if that is possible.

        Returns:
            How many copies were queued.

        Raises:
            EnvironmentFault: the driver refused.
        """
        target, source, size_bytes = (
            np.ascontiguousarray(item, np.int64) for item in (target, source, size_bytes)
        )
        if len(target) == 0:
            return 0
        if size_bytes[0] < LONG_BYTES:
            target, source, size_bytes = joined(target, source, size_bytes)
        count = len(target)
        self._enter(stream)
        if batched and self.batched and count > 1:
            self._check("cuMemcpyBatchAsync", self._batched(target, source, size_bytes, stream))
            return count
        for to, at, size in zip(target.tolist(), source.tolist(), size_bytes.tolist(), strict=True):
            self._check("cuMemcpyAsync", self._lib.cuMemcpyAsync(to, at, size, stream))
        return count

    def _enter(self, stream: int) -> None:
        """Use the device of a stream, in a thread that has used none."""
        context, handle = ctypes.c_void_p(), ctypes.c_void_p(stream)
        self._lib.cuCtxGetCurrent(ctypes.byref(context))
        if not context:
            self._check("cuStreamGetCtx", self._lib.cuStreamGetCtx(handle, ctypes.byref(context)))
            self._check("cuCtxSetCurrent", self._lib.cuCtxSetCurrent(context))

    def _batched(
        self,
        target: NDArray[np.int64],
        source: NDArray[np.int64],
        size_bytes: NDArray[np.int64],
        stream: int,
    ) -> int:
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (target, source, size_bytes)]
        common = (*arrays, ctypes.c_size_t(len(target)), self._attributes, self._first, ctypes.c_size_t(1))
        handle = ctypes.c_void_p(stream)
        if self._batch:
            return int(self._batch(*common, handle))
        failed = ctypes.c_size_t()
        assert self._old_batch is not None  # noqa: S101 - `batched` says so
        return int(self._old_batch(*common, ctypes.byref(failed), handle))

    def _check(self, call: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            raise EnvironmentFault(f"{call}: error {code}, {(text.value or b'unknown').decode()}")


@cache
def driver() -> Driver:
    """The driver of this process."""
    return Driver()
