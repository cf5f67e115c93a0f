"""Exit codes and the exception tree shared by every command.

::

    MusterError                 one line: what, where, what to do; carries its exit code
    ├── BadInput          (2)   wrong use or unusable input, nothing was started
    ├── MachinesNotReady  (3)   a machine cannot take part
    ├── RunFailed         (1)   the run had begun and broke
    └── StoppedByUser   (130)   somebody asked for the stop
"""

from __future__ import annotations

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
        machine: name of the machine that it is about.
        option: name of the option that it is about.
        file: the file or folder that it is about.
        place: how the message begins; default: the machine, or the file.
    """

    exit_code: ExitCode = ExitCode.RUN_FAILED

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
        where = place or machine or str(file)
        self.message = f"{where}: {problem}" if where else problem
        super().__init__(self.message)
        self.problem = problem
        """The message without its beginning, for a reader that shows beside it what it is about."""
        self.hint = hint
        self.machine, self.option, self.file = machine, option, str(file)

    def beside(self, machine: str) -> str:
        """Return the words for a row of ``machine``: those about it without its name, others whole."""
        return self.problem if self.machine == machine else self.message

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class BadInput(MusterError):
    """Wrong use or unusable input."""

    exit_code = ExitCode.BAD_INPUT


class MachinesNotReady(MusterError):
    """A machine cannot take part in the run."""

    exit_code = ExitCode.NOT_READY


class RunFailed(MusterError):
    """A run had begun and broke."""

    exit_code = ExitCode.RUN_FAILED


class StoppedByUser(MusterError):
    """Somebody asked for the stop."""

    exit_code = ExitCode.STOPPED


def where_it_failed(error: Exception) -> str:
    """Return an error of the user's code in one line, with the innermost place."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError):  # its text ends with the place
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "importlib" not in frame.filename), None)
    place = f" ({Path(last.filename).name}, line {last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {text}{place}"


def counted(count: int, one: str, many: str = "") -> str:
    """Return ``1 clip`` or ``3 clips``.

    Args:
        one: what there is one of; words after the noun may follow it where ``many`` says them too.
        many: what there are several or none of; ``one`` with an s by default.
    """
    return f"{count} {one if count == 1 else many or one + 's'}"
