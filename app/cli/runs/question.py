"""A question beside a run's display, which goes on meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
from collections.abc import Collection

from app.console import visible
from app.progress import ProgressDisplay

_ENDS = ("", "\n", "\r", "\x04")
"""End of the input, Enter, Ctrl-D."""
_ERASES = ("\x7f", "\b")


class Question(contextlib.AbstractContextManager["Question"]):
    """A question that the user answers with a line, on the terminal behind stdin.

    A display that paints over what the terminal would echo shows the line itself.

    Args:
        answers: possible first letters, empty for an empty line; another answer is asked for again. None: any is one.
    """

    def __init__(self, text: str, progress: ProgressDisplay, answers: Collection[str] = ()) -> None:
        self._text, self._progress, self._typed, self._answers = text, progress, "", answers
        self._keyboard = sys.stdin.fileno()
        self._modes = termios.tcgetattr(self._keyboard)

    def __enter__(self) -> Question:
        if self._progress.paints:
            modes = termios.tcgetattr(self._keyboard)
            modes[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(self._keyboard, termios.TCSANOW, modes)
        self._progress.ask(self._text)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.ask("")
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            termios.tcsetattr(self._keyboard, termios.TCSANOW, self._modes)

    def answer(self) -> str | None:
        """Return the line, once it has ended; ``None``: not yet. It does not wait."""
        try:
            while select.select([self._keyboard], [], [], 0.0)[0]:
                char = os.read(self._keyboard, 1).decode(errors="ignore")
                if char in _ENDS:
                    if not char or self._is_answer():
                        return self._typed
                    self._progress.ask(f"'{visible(self._typed)}' is no answer. {self._text}")
                    self._typed = ""
                    continue
                self._typed = self._typed[:-1] if char in _ERASES else self._typed + char
                self._progress.show_answer(self._typed)
        except OSError:
            return ""
        return None

    def _is_answer(self) -> bool:
        return not self._answers or self._typed.strip().lower()[:1] in self._answers
