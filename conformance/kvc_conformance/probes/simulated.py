"""Seeded worlds of the declaration under faults, played where the declaration is."""

from __future__ import annotations

from typing import Any

from kvc_conformance.channel import Message
from kvc_conformance.child import Session
from kvc_conformance.probes.store import Arguments, Arrays
from kvc_conformance.sim.fleet import first_found
from kvc_conformance.sim.prompts import Prompts
from kvc_conformance.sim.trace import cut_down
from kvcontract.contract.model import KvModel


def seeds(session: Session, arguments: Arguments, arrays: Arrays) -> Message:
    """Play some seeds of a declaration as it is simulated.

    Arguments: ``model``, ``first``, ``count``.
    Returns ``trace``, what the first that found something came to, cut down; null if none did.
    """
    del arrays
    prompts: Any = session.objects.get("prompts")
    if prompts is None:
        prompts = Prompts(KvModel.model_validate_json(arguments["model"]))
        session.objects["prompts"] = prompts
    first = arguments["first"]
    found = first_found(prompts, range(first, first + arguments["count"]))
    return Message({"trace": None if found is None else cut_down(prompts, found).document()})
