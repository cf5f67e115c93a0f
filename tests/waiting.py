"""Waiting in tests: for as long as a busy machine may need, and with a word of what was waited for."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from app.wizard.engine import Wizard
    from app.wizard.state import WizardState

Found = TypeVar("Found")
PATIENCE = 60.0
"""Seconds within which anything waited for is there, on a busy machine."""
_LOOK = 0.01


def until(happened: Callable[[], Found], patience: float = PATIENCE) -> Found:
    """Ask again and again until the answer is true; return it. Asking takes at most a third of the time.

    Raises:
        AssertionError: it was not in time; names the question and the last answer.
    """
    end = time.monotonic() + patience
    while True:
        asked = time.monotonic()
        if found := happened():
            return found
        now = time.monotonic()
        assert now < end, f"not within {patience:.0f} s: {words_of(happened)} (now: {found!r})"
        time.sleep(max(_LOOK, 2 * (now - asked)))


def timed_out(wait: Callable[[float], object], error: type[Exception], said: str) -> None:
    """Let a wait for so many seconds end with an error that matches ``said``; where a busy machine does not come as far
    in few seconds, it has more."""
    for seconds in (0.5, 4.0, 32.0):
        try:
            wait(seconds)
        except error as found:
            told = str(found)
            if re.search(said, told):
                return
        else:
            told = "no error"
    raise AssertionError(f"{told!r} is not {said!r}")


def until_state(wizard: Wizard, condition: Callable[[WizardState], Any], patience: float = PATIENCE) -> WizardState:
    """Wait until the state of a set-up is so; return it."""
    assert wizard.wait(condition, patience), f"not within {patience:.0f} s: {words_of(condition)} in {wizard.state}"
    return wizard.state


def words_of(condition: Callable[..., Any]) -> str:
    """Return the lines of code that ask the question, for a message."""
    try:
        return " ".join(line.strip() for line in inspect.getsource(condition).splitlines())
    except (OSError, TypeError):  # a method of an object written in C, or a partial
        return repr(condition)
