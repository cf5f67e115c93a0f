"""Log of the commands that this process has run on machines, and of its log-ins there, for display."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_KEPT = 400
_LONGEST_WORD, _LONGEST, _LONGEST_OUTCOME = 60, 300, 200


@dataclass
class CommandRecord:
    """One command that was run on a machine; without a machine, one line about an action."""

    machine: str
    command: str
    """The command in one line; an embedded program is named by its length."""
    outcome: str = ""
    """``ok``, ``ended``, or what went wrong; empty while it runs."""
    at: float = 0.0
    """Unix time of its start; 0: unknown."""
    typed: str = ""
    """The command line that does the same, of an action that is none itself."""


_ran: deque[CommandRecord] = deque(maxlen=_KEPT)
_guard = threading.Lock()


def note(machine: str, argv: Sequence[str]) -> CommandRecord:
    """Record a command that starts now; its stdin is not recorded."""
    words = (_program(word) if "\n" in word else word for word in argv)
    cut = (word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}..." for word in words)
    ran = CommandRecord(machine, " ".join(cut)[:_LONGEST], at=time.time())
    with _guard:
        _ran.append(ran)
    return ran


def _program(word: str) -> str:
    """Return what stands for a program that a command brings along: nobody reads or pastes it from a list."""
    return f"<a program of Muster's, {word.count(chr(10)) + 1} lines>"


@contextlib.contextmanager
def noted(machine: str, argv: Sequence[str]) -> Iterator[None]:
    """Record what the block does as ``argv`` would, with its outcome: ``ok``, or the error.

    A failure that was recorded before, like that of a retry, has the new time instead of a second record.
    """
    record = note(machine, argv)
    try:
        yield
    except Exception as error:  # whatever it was, it is recorded, and raised again
        record.outcome = failure_text(error)
        with _guard:
            earlier = [one for one in _ran if one is not record and _is_same(one, record)]
            for repeated in earlier:
                _ran.remove(repeated)
        raise
    record.outcome = "ok"


def failure_text(error: BaseException) -> str:
    """Return an error as the outcome of a command on a machine, whose name is shown beside it."""
    return str(getattr(error, "problem", error))[:_LONGEST_OUTCOME]


def _is_same(first: CommandRecord, second: CommandRecord) -> bool:
    return (first.machine, first.command, first.outcome) == (second.machine, second.command, second.outcome)


def commands_run() -> list[CommandRecord]:
    """Return the newest commands, oldest first."""
    with _guard:
        return list(_ran)
