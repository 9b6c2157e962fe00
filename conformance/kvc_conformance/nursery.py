"""A process that has imported what children need, and nothing of any plugin, and forks itself for each.

Most of what a run takes is children importing torch and transformers.  A forked child is a process of its own
all the same: nothing that a plugin does there reaches the nursery, or another child.

Over the control socket come a length and JSON, ``{"spawn": {...}}`` with three file descriptors, or
``{"kill": pid}``.  A spawn is answered with the child's pid; what the child has ended with is written to its
own pipe.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any, Final

PRELOADED: Final = (
    "kvc_conformance.probes.churn",
    "kvc_conformance.probes.engine",
    "kvc_conformance.probes.memory",
    "kvc_conformance.probes.reference",
    "kvc_conformance.probes.simulated",
    "kvc_conformance.probes.store",
    "transformers.cache_utils",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""What children import sooner or later; what is not installed is left out."""

LENGTH: Final = struct.Struct("<I")
FDS: Final = 3
"""The child's socket, its log, and the pipe that its end is written to."""


def main() -> None:
    """Serve on the socket whose number is the only argument, until the other side is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    control.sendall(b"+")
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                wake.recv(4096)
            _reap(children)
        if control in ready and not _served(control, children, (wake, waker)):
            return


def _served(control: socket.socket, children: dict[int, int], own: tuple[socket.socket, ...]) -> bool:
    """Answer one request; whether there was one."""
    head, fds, _, _ = socket.recv_fds(control, LENGTH.size, FDS)
    if len(head) < LENGTH.size:
        return False
    (left,) = LENGTH.unpack(head)
    body = bytearray()
    while len(body) < left:
        piece = control.recv(left - len(body))
        if not piece:
            return False
        body += piece
    request = json.loads(body)
    if "kill" in request:
        if request["kill"] in children:  # not reaped yet, so nobody else has its number
            os.kill(request["kill"], signal.SIGKILL)
        return True
    theirs, log, end = fds
    pid = os.fork()
    if not pid:
        for sock in (control, *own):
            sock.close()
        os.close(end)
        for other in children.values():
            os.close(other)
        _be_born(request["spawn"], theirs, log)
    os.close(theirs)
    os.close(log)
    children[pid] = end
    control.sendall(LENGTH.pack(pid))
    return True


def _reap(children: dict[int, int]) -> None:
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            end = children.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(end)


def _be_born(given: dict[str, Any], theirs: int, log: int) -> None:
    """What a child does from its first moment to its last."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(log)
        os.environ.clear()
        os.environ.update(given["environment"])
        os.chdir(given["folder"])
        import numpy as np  # noqa: PLC0415 - only where children are

        from kvc_conformance import child  # noqa: PLC0415 - likewise
        from kvc_conformance.channel import Channel  # noqa: PLC0415 - likewise

        np.random.seed()  # noqa: NPY002 - what the nursery had is everybody's
        sys.argv = [child.__file__, str(theirs)]
        child.serve(Channel(socket.socket(fileno=theirs)))
        status = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
