"""Every command that this process has run on a machine, for the person who asks what was done where."""

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
    """One command that was run on a machine; without a machine, one line of what was done."""

    machine: str
    command: str
    """In one line; programs that travel in a word are cut."""
    outcome: str = ""
    """``ok``, ``ended``, or what went wrong; empty while it runs."""
    at: float = 0.0
    """Unix time of its start; 0: it is not told."""


_ran: deque[CommandRecord] = deque(maxlen=_KEPT)
_guard = threading.Lock()


def note(machine: str, argv: Sequence[str]) -> CommandRecord:
    """Keep a command that begins now; what it is given on stdin is not kept."""
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
