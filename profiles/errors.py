"""Exit codes and the exception tree shared by every command.

::

    MusterError                 one line: what, where, what to do; carries its exit code
    ├── BadInput          (2)   wrong use or unusable input, nothing was started
    │   └── NothingToResume     no snapshot of a run can be resumed from
    ├── MachinesNotReady  (3)   a machine cannot take part
    ├── RunFailed         (1)   the run had begun and broke
    │   └── OthersLost          the others, or the way to them, and nothing here
    └── StoppedByUser   (130)   a person asked for the stop
"""

from __future__ import annotations

import signal
import traceback
from enum import IntEnum
from pathlib import Path, PurePath


class ExitCode(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    """The command did what it was asked to do."""
    RUN_FAILED = 1
    """A run had begun and failed."""
    BAD_INPUT = 2
    """Wrong use or bad input; nothing was started."""
    NOT_READY = 3
    """A machine is not ready to take part."""
    STOPPED = 130
    """Stopped by the user."""


class MusterError(Exception):
    """An error a person can act on.

    Args:
        problem: one line that says what went wrong, and where if none of the following does.
        hint: one line that says what to do about it; may be empty.
        machine: name of the affected machine.
        option: name of the affected option.
        file: the affected file or folder.
        place: prefix of the message; default: the machine, or the file.
    """

    exit_code: ExitCode = ExitCode.RUN_FAILED
    cause: str = ""
    """Stable identifier of what is wrong, for programs; empty: none."""

    def __init__(
        self,
        problem: str,
        hint: str = "",
        *,
        machine: str = "",
        option: str = "",
        file: str | PurePath = "",
        place: str = "",
    ) -> None:
        prefix = place or machine or str(file)
        self.message = f"{prefix}: {problem}" if prefix else problem
        super().__init__(self.message)
        self.problem = problem
        """The message without its prefix, for a display that already names the machine, option or file."""
        self.hint = hint
        self.machine, self.option, self.file = machine, option, str(file)

    def message_for(self, machine: str) -> str:
        """Return the message for a row of ``machine``: without its name if the error is about that machine."""
        return self.problem if self.machine == machine else self.message

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class BadInput(MusterError):
    """Wrong use or unusable input."""

    exit_code = ExitCode.BAD_INPUT


class NothingToResume(BadInput):
    """A run cannot go on from any of its snapshots, even if its events tell of some."""

    def __init__(self, problem: str, hint: str = "start a new run instead") -> None:
        super().__init__(problem, hint)


class MachinesNotReady(MusterError):
    """A machine cannot take part in the run."""

    exit_code = ExitCode.NOT_READY


class RunFailed(MusterError):
    """A run had begun and broke."""

    exit_code = ExitCode.RUN_FAILED


class OthersLost(RunFailed):
    """A member cannot go on as it has lost the others, or they it: it may join them again."""


class StoppedByUser(MusterError):
    """A person asked for the stop."""

    exit_code = ExitCode.STOPPED

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows (IPython asks for it): the message alone."""
        return [str(self)]


def where_it_failed(error: Exception) -> str:
    """Return an error of the user's code in one line, with the file and line of the innermost frame."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError):  # its text ends with the position
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    innermost = next((frame for frame in reversed(frames) if "importlib" not in frame.filename), None)
    location = f" ({Path(innermost.filename).name}, line {innermost.lineno})" if innermost is not None else ""
    return f"{type(error).__name__}: {text}{location}"


_SIGNALS = {
    signal.SIGKILL: "often out of memory, or somebody ended it",
    signal.SIGTERM: "somebody ended it",
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGILL: "a package is built for another processor",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE), "a crash in a compiled package"),
}
"""Usual causes of the signals that end a process."""


def exit_text(code: int) -> str:
    """Return how a process ended, to follow its name.

    Args:
        code: its exit code; negative: the signal that killed it.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    cause = next((cause for number, cause in _SIGNALS.items() if number == -code), "")
    return f"was killed by signal {-code}{f': {cause}' if cause else ''}"


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return ``1 clip`` or ``3 clips``.

    Args:
        singular: the noun for a count of 1; it may include words after the noun if ``plural`` does too.
        plural: the noun for any other count; default: ``singular`` with an s.
    """
    return f"{count} {singular if count == 1 else plural or singular + 's'}"
