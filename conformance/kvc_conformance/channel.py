"""Messages between the parent and a child: a JSON object and raw arrays, over one socket.

No pickle: what comes from a process that has imported a plugin is data only.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LENGTHS: Final = struct.Struct("<II")


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


class Channel:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: Message) -> None:
        """Send one message."""
        heads = [(name, array.dtype.str, list(array.shape)) for name, array in message.arrays.items()]
        head = json.dumps({"body": message.body, "arrays": heads}).encode()
        blobs = [np.ascontiguousarray(array).tobytes() for array in message.arrays.values()]
        self._sock.sendall(_LENGTHS.pack(len(head), len(blobs)) + head)
        for blob in blobs:
            self._sock.sendall(struct.pack("<Q", len(blob)))
            self._sock.sendall(blob)

    def receive(self, timeout_s: float | None = None) -> Message:
        """Receive one message.

        Raises:
            ChannelClosed: the other side is gone.
            TimeoutError: nothing came in time.
        """
        self._sock.settimeout(timeout_s)
        size, count = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        head = json.loads(self._exactly(size))
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in head["arrays"]:
            (length,) = struct.unpack("<Q", self._exactly(8))
            arrays[name] = np.frombuffer(self._exactly(length), np.dtype(dtype)).reshape(shape)
        if count != len(arrays):
            raise ChannelClosed("the other side sent a malformed message")
        return Message(head["body"], arrays)

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
