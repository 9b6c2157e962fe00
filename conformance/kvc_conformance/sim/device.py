"""A simulated device: copies between blocks stand in line, and can fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcontract.memory.binding import Binding


class BrokenCopy(Exception):
    """A copy that was let fail."""


class Device:
    """The order of work of the workers of one rank.

    What is copied inside a device is done once somebody needs it: the next step, or whoever waits for an
    event.  Until then its source and its target are as they were.

    Args:
        deferred: whether copies wait at all.

    Attributes:
        breaking: the copy with this number, of those that are asked for from now on, fails; None: none does.
    """

    def __init__(self, *, deferred: bool) -> None:
        self._deferred = deferred
        self._line: deque[Callable[[], None]] = deque()
        self._submitted = self._done = 0
        self.breaking: int | None = None

    def __len__(self) -> int:
        return len(self._line)

    def submit(self, copy: Callable[[], None]) -> None:
        """Do a copy in its turn.

        Raises:
            BrokenCopy: it is one that fails.
        """
        if self.breaking is not None:
            self.breaking -= 1
            if self.breaking < 0:
                self.breaking = None
                raise BrokenCopy("the schedule lets it fail")
        if not self._deferred:
            copy()
            return
        self._submitted += 1
        self._line.append(copy)

    def event(self) -> Event | None:
        """After which all that is in line now is done; None if copies never wait."""
        return Event(self, self._submitted) if self._deferred else None

    def reach(self, number: int) -> None:
        """Do what stands in line, up to a copy."""
        while self._done < number:
            self._done += 1
            self._line.popleft()()

    def catch_up(self) -> None:
        """Do all that stands in line: a step begins."""
        self.reach(self._submitted)


@dataclass(frozen=True, slots=True)
class Event:
    """A point of a device's work."""

    device: Device
    number: int

    def wait(self, stream: Any) -> None:
        """There is one stream: what comes later is done later."""

    def synchronize(self) -> None:
        """Wait for it here."""
        self.device.reach(self.number)


@dataclass(frozen=True)
class DeviceBinding(Binding):
    """Memory of a simulated device.

    Attributes:
        line: of the device.
    """

    line: Device

    def _queue(self, pairs: list[tuple[int, int]]) -> None:
        """In its turn."""
        self.line.submit(lambda: Binding._queue(self, pairs))  # noqa: SLF001 - of the base class

    def _stream(self) -> int:
        """The one there is."""
        return 0

    def event(self) -> Event | None:
        """See `Device.event`."""
        return self.line.event()
