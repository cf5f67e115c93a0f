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
class Ran:
    """One command."""

    machine: str
    command: str
    """In one line; programs that travel in a word are cut."""
    at: float
    """Unix time of its start."""
    outcome: str = ""
    """``ok``, ``ended``, or what went wrong; empty while it runs."""


_ran: deque[Ran] = deque(maxlen=_KEPT)
_guard = threading.Lock()


def note(machine: str, argv: Sequence[str]) -> Ran:
    """Keep a command that begins now; what it is given on stdin is not kept."""
    words = (" ".join(word.split()) for word in argv)
    cut = (word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}..." for word in words)
    ran = Ran(machine, " ".join(cut)[:_LONGEST], time.time())
    with _guard:
        _ran.append(ran)
    return ran


def commands_run() -> list[Ran]:
    """Return the newest commands, oldest first."""
    with _guard:
        return list(_ran)
