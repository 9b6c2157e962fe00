"""What the hook that opens a tier is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcontract.contract.model import CONTRACT_REVISION


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """The one argument of `kvc_tier`; new needs become new attributes.

    Attributes:
        directory: where the tier may keep files; made if it does not exist.
        capacity_bytes: quota.
        clock: what deadlines and the time of handoffs are measured on.
        handoff_ttl_s: how long a handoff is kept if nobody releases it.
        meta: what all who ever open this store must agree on; plain JSON.
        options: the tier's own, as text.
        allocate: bytes -> a writable buffer, where memory for records should come from: pinned for a device.
            None: from anywhere.
        contract: the contract revision the host serves.
    """

    directory: Path
    capacity_bytes: int
    clock: Callable[[], float] = time.monotonic
    handoff_ttl_s: float = 60.0
    meta: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    allocate: Callable[[int], Any] | None = None
    contract: int = CONTRACT_REVISION
