"""Helpers of all commands: output for people or programs, questions, progress of long work."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from app.console import answered_yes, say, say_error, show_json, show_line, visible
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from training.tasks.base import Progress


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, kill, and a closed terminal."""


def answer(
    as_json: bool, document: Mapping[str, Any], lines: Iterable[str], code: ExitCode = ExitCode.DONE
) -> ExitCode:
    """Write a command's result: one document that ends with the exit code, or lines for people."""
    if as_json:
        show_json({**document, "exit_code": int(code)})
    else:
        for line in lines:
            show_line(line)
    return code


def fail(message: str, hint: str, code: ExitCode, as_json: bool) -> ExitCode:
    """Write an error: with ``--json`` as the only document on stdout, else to stderr."""
    if as_json:
        show_json({"error": {"message": message, "hint": hint}, "exit_code": int(code)})
    else:
        say_error(message, hint)
    return code


def somebody(as_json: bool = False) -> bool:
    """Whether a user is at this terminal and can be asked; never with ``--json``."""
    return not as_json and sys.stdin.isatty() and sys.stderr.isatty()


def confirmed(question: str, action: str, as_json: bool = False) -> bool:
    """Ask the user at the terminal for confirmation.

    Raises:
        BadInput: there is no terminal to confirm ``action`` on, or ``as_json`` is set.
    """
    if as_json or not sys.stdin.isatty():
        raise BadInput(f"{action}, and no terminal to confirm on", "check the list, then repeat with --yes")
    return answered_yes(question)


@contextlib.contextmanager
def heard_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have ``handler`` receive, inside the context, the signals that would end the command."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class PacedLines:
    """Says lines about preparing machines; of those that count one piece of work of a machine, one every ten seconds.

    Args:
        write: takes a line.
        clock: seconds, for tests.
    """

    INTERVAL = 10.0

    def __init__(self, write: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._due: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        words = getattr(line, "words", "")  # of an installation's progress; its first two say what it counts
        kind, now = (getattr(line, "machine", ""), *words.split()[:2]), self._clock()
        with self._lock:
            if words and now < self._due.get(kind, now):
                return
            self._due[kind] = now + self.INTERVAL
        self._write(visible(line))


@contextlib.contextmanager
def only_data_on_stdout() -> Iterator[None]:
    """Redirect libraries' prints to stderr, and silence their warnings for programmers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def reporting(title: str) -> Iterator[Progress]:
    """Show the phases of long work as lines on stderr, together with libraries' prints."""
    from app.progress import PlainProgress
    from training.records.events import ProgressEvent

    with PlainProgress(title) as lines, only_data_on_stdout():
        yield lambda phase, done, total: lines(ProgressEvent(phase=phase, done=done, total=total))
