"""Waiting in tests: long enough for a busy machine, and with an error that names the condition."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from app.wizard.engine import Wizard
    from app.wizard.state.state import WizardState

Found = TypeVar("Found")
PATIENCE = 60.0
"""Default seconds to wait, enough for a busy machine."""
_LOOK = 0.01


def until(happened: Callable[[], Found], patience: float = PATIENCE) -> Found:
    """Poll a condition until it is true and return its value; polling takes at most a tenth of the time.

    Raises:
        AssertionError: it was not true in time; the text has the condition and its last value.
    """
    end = time.monotonic() + patience
    while True:
        asked = time.monotonic()
        if found := happened():
            return found
        now = time.monotonic()
        assert now < end, f"not within {patience:.0f} s: {words_of(happened)} (now: {found!r})"
        time.sleep(max(_LOOK, 9 * (now - asked)))


def timed_out(wait: Callable[[float], object], error: type[Exception], said: str) -> None:
    """Check that a wait fails with an error that matches ``said``.

    Args:
        wait: called with a timeout of 0.5, 4 and 32 seconds until the error matches: a busy machine may need longer.
    """
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
    """Wait until the state of a set-up fulfils a condition; return it."""
    assert wizard.wait(condition, patience), f"not within {patience:.0f} s: {words_of(condition)} in {wizard.state}"
    return wizard.state


def words_of(condition: Callable[..., Any]) -> str:
    """Return the source of a condition on one line, for error messages."""
    try:
        return " ".join(line.strip() for line in inspect.getsource(condition).splitlines())
    except (OSError, TypeError):  # a method of an object written in C, or a partial
        return repr(condition)
