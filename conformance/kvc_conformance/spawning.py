"""How a child comes into being: from an interpreter of its own, or quicker, forked by a nursery."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, Protocol

from kvc_conformance.nursery import LENGTH

READY_S: Final = 120.0


class Process(Protocol):
    """What a child is to whoever made it; as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """What it ended with; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` if it does not come."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Nursery:
    """The parent's handle on one.

    Args:
        environment: of the nursery itself; a child's is given when it is born.

    Attributes:
        ready: whether a child has been had.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self.ready = False
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-I", "-m", "kvc_conformance.nursery", str(theirs.fileno())],
            env=dict(environment),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether children can be had."""
        return self._process.poll() is None

    def spawn(self, sock: socket.socket, log: IO[bytes], environment: Mapping[str, str]) -> Process | None:
        """A child that serves on a socket; None if there is none to be had.

        Args:
            sock: the child's end, which stays the caller's to close.
            log: what it prints goes there.
            environment: of the child.
        """
        with self._lock:
            ours, theirs = os.pipe()
            try:
                self._control.settimeout(READY_S)
                if not self.ready and self._control.recv(1) != b"+":
                    raise ConnectionError
                self.ready = True
                given = {"spawn": {"environment": dict(environment), "folder": str(Path.cwd())}}
                self._send(given, [sock.fileno(), log.fileno(), theirs])
                (pid,) = LENGTH.unpack(self._control.recv(LENGTH.size, socket.MSG_WAITALL))
            except (OSError, struct.error):  # it has died, or hangs: an interpreter of its own is as good
                os.close(ours)
                self.close()
                return None
            finally:
                os.close(theirs)
        return _Forked(self, pid, ours)

    def end(self, pid: int) -> None:
        """End a child that it has."""
        with self._lock, contextlib.suppress(OSError):
            self._send({"kill": pid}, [])

    def close(self) -> None:
        """End it; its children end with their parent."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _send(self, request: Mapping[str, object], fds: list[int]) -> None:
        body = json.dumps(request).encode()
        socket.send_fds(self._control, [LENGTH.pack(len(body))], fds)
        self._control.sendall(body)


class _Forked:
    """A child of a nursery."""

    def __init__(self, nursery: Nursery, pid: int, end: int) -> None:
        self._nursery, self._pid, self._end = nursery, pid, end
        self._code: int | None = None

    def poll(self) -> int | None:
        """See `Process`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """See `Process`."""
        if self._code is None:
            ready, _, _ = select.select([self._end], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("a child", timeout or 0)
            told = os.read(self._end, 16)
            os.close(self._end)
            self._code = int(told) if told else -9  # the nursery has died before it
        return self._code

    def kill(self) -> None:
        """See `Process`."""
        if self._code is None:
            self._nursery.end(self._pid)


_nurseries: dict[str, Nursery] = {}


def nursery(environment: Mapping[str, str], threads: int | None) -> Nursery | None:
    """The one of this process for so many threads; made at the first call, and anew if it has died.

    None where processes cannot fork.
    """
    if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
        return None
    name = str(threads)
    found = _nurseries.get(name)
    if found is not None and not found.alive:
        found.close()
        if not found.ready:
            return None  # the next would not come to be either
    if found is None or not found.alive:
        if not _nurseries:
            atexit.register(_close)
        found = _nurseries[name] = Nursery(environment)
    return found


def _close() -> None:
    for item in _nurseries.values():
        item.close()
    _nurseries.clear()
