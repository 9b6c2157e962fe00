"""The manifest of a contract revision: which clauses it has, as a file that a later registry is held to."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from kvcontract.contract.clause import Keeper, Level
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.model import CONTRACT_REVISION

_FOLDER: Final = "revisions"


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of the contract.

    Attributes:
        number: what a plugin states as KVC_CONTRACT.
        draft: it may still change; a frozen one never does.
        clauses: level and keeper of each clause, by its id.
        retired: ids of clauses that are no more; none of them is used again.
        digest: of the manifest's bytes.
    """

    number: int
    draft: bool
    clauses: dict[str, tuple[Level, Keeper]]
    retired: tuple[str, ...]
    digest: str

    @property
    def title(self) -> str:
        """The revision in words."""
        return f"revision {self.number}{' (draft)' if self.draft else ''}"


def revision(number: int = CONTRACT_REVISION) -> Revision:
    """Read the manifest of a revision.

    Raises:
        UsageFault: there is no such revision; those that there are are named.
    """
    folder = files(__package__) / _FOLDER
    manifest = folder / f"{number}.toml"
    if not manifest.is_file():
        known = sorted(item.name.removesuffix(".toml") for item in folder.iterdir())
        raise UsageFault(f"there is no contract revision {number!r}; there is {', '.join(known)}")
    data = manifest.read_bytes()
    read = tomllib.loads(data.decode())
    return Revision(
        number=read["revision"],
        draft=read["status"] == "draft",
        clauses={name: (level, who) for name, (level, who) in read["clauses"].items()},
        retired=tuple(read["retired"]),
        digest=hashlib.blake2b(data, digest_size=16).hexdigest(),
    )
