"""One breach of one clause, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of one clause.

    Attributes:
        clause: id of the clause.
        path: where in the declaration, e.g. ``arenas[3].fields[0].dtype``.
        value: what was found there.
        allowed: what may be there.
        message: what is wrong, in words.
        where: ``file:line`` of the author's code, if known.
    """

    clause: str
    path: str
    value: Any
    allowed: str
    message: str
    where: str | None = None

    def line(self) -> str:
        """The finding in one line."""
        place = f" ({self.where})" if self.where else ""
        return f"{self.clause} {self.path} = {self.value!r}: {self.message}; allowed: {self.allowed}{place}"

    def as_json(self) -> dict[str, Any]:
        """The finding as plain JSON; a value that JSON has not is shown as Python writes it."""
        plain = self.value if isinstance(self.value, str | int | float | None) else repr(self.value)
        return {**asdict(self), "value": plain}
