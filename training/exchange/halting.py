"""How all members stop after the same step when their supervisor is gone: each reports to the coordinator after which
step it can stop, and the coordinator names the last of these."""

from __future__ import annotations

from collections.abc import Callable

from training.exchange.coordinator_protocol import GroupStatus


class Halting:
    """A member's side.

    Args:
        note: reports a change of this member to the coordinator.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self.on_request: Callable[[], None] = lambda: None
        """Called, repeatedly, when all members are to propose a step."""
        self.on_decision: Callable[[int], None] = lambda step: None
        """Called, repeatedly, with the step to stop after."""

    def propose(self, step: int) -> None:
        """Propose the step after which this member can stop; it must not go beyond it from then on."""
        self._note(halt=step)

    def process_status(self, status: GroupStatus) -> None:
        """Process the coordinator's status."""
        if status.halt >= 0:
            self.on_decision(status.halt)
        elif status.halting:
            self.on_request()
