"""The child process: executes probes and answers; imports the plugin only when a probe needs it."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvc_conformance.channel import Channel, ChannelClosed, Message

PROBES: Final[Mapping[str, str]] = {
    "churn": "kvc_conformance.probes.churn",
    "declare": "kvc_conformance.probes.declare",
    "memory": "kvc_conformance.probes.memory",
    "simulated": "kvc_conformance.probes.simulated",
    "store": "kvc_conformance.probes.store",
    "engine": "kvc_conformance.probes.engine",
    "reference": "kvc_conformance.probes.reference",
    "tier": "kvc_conformance.probes.tier",
    "tier_stress": "kvc_conformance.probes.tier_stress",
}
"""Family of a probe (the part of its name before the first dot) to the module that has it."""


@dataclass(slots=True)
class Session:
    """What probes of one child share.

    Attributes:
        job: what the parent said first.
        objects: what probes keep between calls, by a name the parent chose.
    """

    job: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


Probe = Callable[[Session, dict[str, Any], Mapping[str, Any]], Message]


def serve(channel: Channel) -> None:
    """Answer until the parent is gone."""
    session, own = Session(), os.getpid()
    while True:
        try:
            message = channel.receive()
        except ChannelClosed:
            return
        answer = _answer(session, message)
        if os.getpid() != own:
            os._exit(1)  # the plugin forked: a second answer would be taken for that of the next question
        channel.send(answer)


def _answer(session: Session, message: Message) -> Message:
    probe, arguments = message.body["probe"], message.body["arguments"]
    try:
        if probe == "begin":
            session.job = arguments
            return Message({})
        family, _, name = probe.partition(".")
        function: Probe = getattr(importlib.import_module(PROBES[family]), name)
        answer = function(session, arguments, message.arrays)
        json.dumps(answer.body)  # what a plugin returned may be no JSON
        return answer  # noqa: TRY300 - or is it the exception below
    except BaseException as error:  # noqa: BLE001 - the parent is told everything, SystemExit too
        return Message({"raised": describe(error, session.job)})


def describe(error: BaseException, job: Mapping[str, Any]) -> dict[str, Any]:
    """An exception as plain JSON, with the clause it names and the plugin's own line, if any."""
    raised = [error, *([error.__cause__] if error.__cause__ is not None else [])]
    frames = [frame for one in raised for frame in traceback.extract_tb(one.__traceback__)]
    homes = [str(Path(home)) for home in job.get("homes", ())]
    own = [frame for frame in frames if any(frame.filename.startswith(home) for home in homes)]
    return {
        "kind": type(error).__name__,
        "text": _words(error),
        "trace": "".join(traceback.format_exception(error)),
        "clause": getattr(error, "clause", None),
        "from_plugin": bool(own),
        "where": f"{own[-1].filename}:{own[-1].lineno}" if own else None,
    }


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 - a plugin's exception may not even have words
        return f"(its __str__ raised {type(inner).__name__})"


def main() -> None:
    """Serve on the socket whose number is the only argument."""
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
