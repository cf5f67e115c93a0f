"""How all members of a group stop after the same step when whoever started it is gone: the coordinator hears after
which step each of them can, and names the last."""

from __future__ import annotations

from collections.abc import Callable

from training.exchange.coordinator_protocol import GroupStatus


class Halting:
    """A member's end.

    Args:
        note: tells the coordinator something of this member.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self.called: Callable[[], None] = lambda: None
        """Told, again and again, that all are to say after which step they can stop."""
        self.named: Callable[[int], None] = lambda step: None
        """Told, again and again, the step."""

    def propose(self, step: int) -> None:
        """Say after which step this member can stop; it must not go beyond it then."""
        self._note(halt=step)

    def heard(self, status: GroupStatus) -> None:
        """Take in what the coordinator says."""
        if status.halt >= 0:
            self.named(status.halt)
        elif status.halting:
            self.called()
