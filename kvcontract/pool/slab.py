"""Live slots of a bounded group: one for each active request, rewritten at each of its tokens.

Slot 0 is padding and never given out, like page 0.  Snapshots of slots are not served yet, so a group that
has them is not checkpointable.
"""

from __future__ import annotations

import threading

from kvcontract.contract.errors import UsageFault


class LiveSlots:
    """Gives slots out and takes them back.

    Args:
        slots: of the arenas, slot 0 included.

    Raises:
        UsageFault: fewer than 2 slots; the message names the number needed (F6).
    """

    def __init__(self, slots: int) -> None:
        if slots < 2:  # noqa: PLR2004 - slot 0 and one to use
            raise UsageFault(f"{slots} slots: expected at least 2 (slot 0 is padding), one more a request")
        self.slots = slots
        self._lock = threading.Lock()
        self._free = list(range(slots - 1, 0, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        """Slots that can be given out."""
        with self._lock:
            return len(self._free)

    def take(self) -> int | None:
        """A slot, or None if all are taken."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._held.add(slot)
            return slot

    def release(self, slot: int) -> None:
        """Take a slot back.

        Raises:
            UsageFault: it is not given out (B16).
        """
        with self._lock:
            if slot not in self._held:
                raise UsageFault(f"slot {slot} is not given out: released before, or never taken")
            self._held.discard(slot)
            self._free.append(slot)
