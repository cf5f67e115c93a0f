"""Collect all errors of a file and report them at once, instead of one per attempt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from profiles.errors import BadInput

_SHOWN = 5  # errors that are listed individually
_LOCATED = re.compile(r"(?P<file>.*?), \w+ (?P<line>\d+)(?P<column>, column [^:]+)?: (?P<problem>.*)", re.DOTALL)


class FileFaults(BadInput):
    """Errors of one file; ``problems`` has one line for each of the first, beginning with ``FILE:LINE``."""

    def __init__(self, problem: str, hint: str, problems: Sequence[str]) -> None:
        super().__init__(problem, hint)
        self.problems = tuple(problems)


class Faults:
    """Collects the errors of one file, to raise all of them at once: wrap fallible code in ``with faults:``."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._errors = list[BadInput]()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, BadInput):
            self._errors.append(error)
        return isinstance(error, BadInput)

    def clear(self) -> None:
        """Discard the collected errors."""
        self._errors.clear()

    def raise_any(self) -> None:
        """Raise the collected errors, if any.

        Raises:
            BadInput: lists the first errors, and the number of further ones.
        """
        if not self._errors:
            return
        first_error, file = self._errors[0], f"{self.file}, "
        before, named, after = first_error.message.partition(file)  # it alone names the file, and once
        messages = [before + named + after.replace(file, "")]
        messages += [error.message.replace(file, "") for error in self._errors[1:_SHOWN]]
        unnamed = [f"and {len(self._errors) - _SHOWN} more"] if len(self._errors) > _SHOWN else []
        hints = dict.fromkeys(error.hint for error in self._errors if error.hint)
        lines = [_in_a_line(error.message, self.file) for error in sorted(self._errors[:_SHOWN], key=_line_number)]
        lines += [f"{line} in {self.file.name}" for line in unnamed]
        raise FileFaults("; ".join(messages + unnamed), "; ".join(hints), lines) from first_error


def _line_number(error: BadInput) -> int:
    located = _LOCATED.fullmatch(error.message)
    return int(located["line"]) if located else 0


def _in_a_line(message: str, file: Path) -> str:
    """Return an error as ``FILE:LINE: column NAME: problem``, with paths relative to the file's folder."""
    located = _LOCATED.fullmatch(message)
    problem = located["problem"] if located else message
    short = problem.replace(f"{file}, ", "").replace(f"{file.parent}/", "")
    if located is None:
        return short
    column = (located["column"] or "").removeprefix(", ")
    words = f"{column} is empty" if column and short == "empty" else f"{column}: {short}" if column else short
    return f"{file.name}:{located['line']}: {words}"
