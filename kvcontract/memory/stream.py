"""What is known of a device's work without knowing the device."""

from __future__ import annotations

from typing import Any, Protocol


class StreamEvent(Protocol):
    """A point of a device's work, such as `torch.cuda.Event`."""

    def wait(self, stream: Any) -> Any:
        """Let a stream wait for it; the caller goes on."""
        ...

    def synchronize(self) -> Any:
        """Wait for it here."""
        ...
