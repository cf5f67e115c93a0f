"""All that is wrong with a file at once, instead of one error an attempt."""

from __future__ import annotations

from pathlib import Path

from profiles.errors import BadInput

_SHOWN = 5  # errors that are named one by one


class Faults:
    """Collects the errors of one file, to raise all of them at once: ``with faults:`` around what may be wrong."""

    def __init__(self, file: Path) -> None:
        self._file, self._errors = file, list[BadInput]()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, BadInput):
            self._errors.append(error)
        return isinstance(error, BadInput)

    def clear(self) -> None:
        """Forget what was collected."""
        self._errors.clear()

    def raise_any(self) -> None:
        """Raise what was collected, if anything.

        Raises:
            BadInput: the first errors that were collected, and how many more there are.
        """
        if not self._errors:
            return
        first, *others = self._errors
        messages = [first.message, *(error.message.removeprefix(f"{self._file}, ") for error in others[: _SHOWN - 1])]
        more = [f"and {len(self._errors) - _SHOWN} more"] if len(self._errors) > _SHOWN else []
        hints = dict.fromkeys(error.hint for error in self._errors if error.hint)
        raise BadInput("; ".join(messages + more), "; ".join(hints)) from first
