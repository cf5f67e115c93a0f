"""What commands have in common: an answer for a person or a program, a question, progress while libraries work."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from app.console import answered_yes, say_error, show_json, show_line
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from training.tasks.base import Progress


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a kill, and a terminal that is closed."""


def answer(
    as_json: bool, document: Mapping[str, Any], lines: Iterable[str], code: ExitCode = ExitCode.DONE
) -> ExitCode:
    """Write what a command has found: one document that ends with the exit code, or lines for a person."""
    if as_json:
        show_json({**document, "exit_code": int(code)})
    else:
        for line in lines:
            show_line(line)
    return code


def fail(message: str, hint: str, code: ExitCode, as_json: bool) -> ExitCode:
    """Write what went wrong: with ``--json`` as the one document on stdout, else to stderr."""
    if as_json:
        show_json({"error": {"message": message, "hint": hint}, "exit_code": int(code)})
    else:
        say_error(message, hint)
    return code


def somebody(as_json: bool = False) -> bool:
    """Whether a person sits at this terminal and can be asked; who wants a document is not."""
    return not as_json and sys.stdin.isatty() and sys.stderr.isatty()


def confirmed(question: str, action: str, as_json: bool = False) -> bool:
    """Ask the person at the terminal for a clear yes.

    Raises:
        BadInput: there is no terminal to confirm ``what`` on, or a document is wanted.
    """
    if as_json or not sys.stdin.isatty():
        raise BadInput(f"{action}, and no terminal to confirm on", "check the list, then repeat with --yes")
    return answered_yes(question)


@contextlib.contextmanager
def heard_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` hear meanwhile what would end the command."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def only_data_on_stdout() -> Iterator[None]:
    """Let whatever libraries print go to stderr, and keep their advice to programmers from a person."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def reporting(title: str) -> Iterator[Progress]:
    """Show the phases of long work as lines on stderr, where whatever libraries print goes as well."""
    from app.progress import PlainProgress
    from training.events import ProgressEvent

    with PlainProgress(title) as lines, only_data_on_stdout():
        yield lambda phase, done, total: lines(ProgressEvent(phase=phase, done=done, total=total))
