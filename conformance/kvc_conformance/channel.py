"""Messages between the parent and a child: a JSON object and raw arrays, over one socket.

No pickle: what comes from a process that has imported a plugin is data only.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LENGTHS: Final = struct.Struct("<8sII")
_MAGIC: Final = b"kvc-msg\0"
_HEAD_LIMIT_BYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        body: plain JSON.
        arrays: named arrays of any numeric dtype and shape.
    """

    body: dict[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class ChannelClosed(EOFError):
    """The other side is gone."""


class ChannelGarbled(ValueError):
    """What came is no message: someone else wrote to the socket."""


class Channel:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: Message) -> None:
        """Send one message."""
        heads = [(name, array.dtype.str, list(array.shape)) for name, array in message.arrays.items()]
        head = json.dumps({"body": message.body, "arrays": heads}).encode()
        blobs = [np.ascontiguousarray(array).tobytes() for array in message.arrays.values()]
        self._sock.sendall(_LENGTHS.pack(_MAGIC, len(head), len(blobs)) + head)
        for blob in blobs:
            self._sock.sendall(struct.pack("<Q", len(blob)))
            self._sock.sendall(blob)

    def receive(self, timeout_s: float | None = None) -> Message:
        """Receive one message.

        Raises:
            ChannelClosed: the other side is gone.
            ChannelGarbled: what came is no message.
            TimeoutError: nothing came in time.
        """
        self._sock.settimeout(timeout_s)
        magic, size, count = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        if magic != _MAGIC or size > _HEAD_LIMIT_BYTES:
            raise ChannelGarbled(f"{bytes(magic)!r} begins no message")
        try:
            head = json.loads(self._exactly(size))
            body, heads = dict(head["body"]), [(str(n), np.dtype(d), tuple(s)) for n, d, s in head["arrays"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ChannelGarbled(f"the head of a message is not readable: {error}") from error
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in heads:
            (length,) = struct.unpack("<Q", self._exactly(8))
            if length != dtype.itemsize * math.prod(shape):
                raise ChannelGarbled(f"array {name!r} has {length} B, its shape {list(shape)} of {dtype}")
            arrays[name] = np.frombuffer(self._exactly(length), dtype).reshape(shape)
        if count != len(arrays):
            raise ChannelGarbled(f"{len(arrays)} arrays came of {count}")
        return Message(body, arrays)

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def _exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, at = memoryview(buffer), 0
        while at < count:
            try:
                got = self._sock.recv_into(view[at:])
            except ConnectionResetError:
                got = 0
            if not got:
                raise ChannelClosed("the child process ended")
            at += got
        return buffer
