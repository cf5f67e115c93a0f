"""Log of the commands that this process has run on machines, for display."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_KEPT = 400
_LONGEST_WORD, _LONGEST = 60, 300


@dataclass
class CommandRecord:
    """One command that was run on a machine; without a machine, one line about an action."""

    machine: str
    command: str
    """The command in one line; embedded programs are cut."""
    outcome: str = ""
    """``ok``, ``ended``, or what went wrong; empty while it runs."""
    at: float = 0.0
    """Unix time of its start; 0: unknown."""


_ran: deque[CommandRecord] = deque(maxlen=_KEPT)
_guard = threading.Lock()


def note(machine: str, argv: Sequence[str]) -> CommandRecord:
    """Record a command that starts now; its stdin is not recorded."""
    words = (" ".join(word.split()) for word in argv)
    cut = (word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}..." for word in words)
    ran = CommandRecord(machine, " ".join(cut)[:_LONGEST], at=time.time())
    with _guard:
        _ran.append(ran)
    return ran


def commands_run() -> list[CommandRecord]:
    """Return the newest commands, oldest first."""
    with _guard:
        return list(_ran)
