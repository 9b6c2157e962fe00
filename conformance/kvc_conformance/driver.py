"""The parent's handle on a child process that executes what the parent asks for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any, Final

from numpy.typing import NDArray

from kvc_conformance.channel import Channel, ChannelClosed, ChannelGarbled, Message
from kvc_conformance.spawning import nursery
from kvcontract.contract.errors import KvContractError

SCRUBBED: Final = ("PYTHON", "PYTEST", "KVC_", "HYPOTHESIS")
"""Environment variables with these beginnings do not reach a child: nothing outside may sway it."""

NO_TILES: Final = "AVX512_CORE"
"""Instructions that a processor's matrix unit is not among: with it, sums of one row depend on how many rows
there are, and a prefill that is cut differs in the last bit from one that is not."""

LOG_TAIL: Final = 2000


class ProbeFailed(KvContractError):
    """A probe raised in the child.

    Attributes:
        kind: name of the exception's class.
        text: its message.
        trace: the traceback.
        clause: the clause that the exception itself names, or None.
        from_plugin: whether a frame of the plugin's own file is in the traceback.
    """

    exit_code = 5

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.kind = str(answer["kind"])
        self.text = str(answer["text"])
        self.trace = str(answer["trace"])
        self.clause: str | None = answer.get("clause")
        self.where: str | None = answer.get("where")
        self.from_plugin = bool(answer.get("from_plugin"))
        super().__init__(f"{self.kind}: {self.text}")


class ChildDied(KvContractError):
    """The child ended or hung; the message carries the end of its log."""

    exit_code = 5


def scrubbed(threads: int | None = None) -> dict[str, str]:
    """The environment of a child: this process's, without what could sway it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED)}
    environment["HF_HUB_OFFLINE"] = "1"
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
        environment["ONEDNN_MAX_CPU_ISA"] = NO_TILES
    return environment


class Child:
    """A process of our own that imports the plugin (or, without a job for one, the reference alone).

    Args:
        job: plain JSON handed to the child's first message: where the plugin is, its options, ...
        threads: of the child's arithmetic; None leaves it to the libraries.
        forked: born in a nursery, where what it needs is imported; hashes and the like are then the same in
            all of them.
        swayed: variables of the environment that differ from this process's.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        *,
        threads: int | None = None,
        forked: bool = False,
        swayed: Mapping[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        environment = {**scrubbed(threads), **(swayed or {})}
        born = nursery(environment, threads) if forked else None
        process = None if born is None else born.spawn(theirs, self._log, environment)
        self._process = process or subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-I", "-m", "kvc_conformance.child", str(theirs.fileno())],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._channel = Channel(ours)
        self.call("begin", job, timeout_s=120)

    def call(
        self,
        probe: str,
        arguments: Mapping[str, Any] | None = None,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        timeout_s: float = 120,
    ) -> Message:
        """Have a probe executed.

        Args:
            probe: its name.
            arguments: plain JSON.
            arrays: numeric arrays.
            timeout_s: after which the child counts as hung and is ended.

        Raises:
            ProbeFailed: it raised.
            ChildDied: the process ended or hung.
        """
        try:
            self._channel.send(Message({"probe": probe, "arguments": dict(arguments or {})}, arrays or {}))
            answer = self._channel.receive(timeout_s)
        except TimeoutError as error:
            self._process.kill()
            raise ChildDied(f"{probe} did not answer within {timeout_s:g} s{self._tail()}") from error
        except (ChannelClosed, ConnectionError) as error:
            raise ChildDied(f"the process ended with {self._ended()} during {probe}{self._tail()}") from error
        except ChannelGarbled as error:
            self._process.kill()
            raise ChildDied(
                f"{probe} was answered with something that is no message ({error}): the plugin wrote to a"
                f" socket that is not its own{self._tail()}"
            ) from error
        if "raised" in answer.body:
            raise ProbeFailed(answer.body["raised"])
        return answer

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process without a warning."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process: politely, then not."""
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ended(self) -> str:
        """How the process ended; one that only closed its socket is ended."""
        try:
            return f"code {self._process.wait(10)}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "its socket closed"

    def _tail(self) -> str:
        self._process.wait()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return f"; its last words:\n{text[-LOG_TAIL:]}" if text else ""
