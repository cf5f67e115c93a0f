"""Collect all errors of a file and report them at once, instead of one per attempt."""

from __future__ import annotations

from pathlib import Path

from profiles.errors import BadInput

_SHOWN = 5  # errors that are listed individually


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
        raise BadInput("; ".join(messages + unnamed), "; ".join(hints)) from first_error
