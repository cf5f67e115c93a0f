"""A question beside a run's display, which goes on meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios

from app.progress import ProgressDisplay

_ENDS = ("", "\n", "\r", "\x04")
"""End of the input, Enter, Ctrl-D."""
_ERASES = ("\x7f", "\b")


class Question(contextlib.AbstractContextManager["Question"]):
    """A question that the user answers with a line, on the terminal behind stdin.

    A display that paints over what the terminal would echo shows the line itself.
    """

    def __init__(self, text: str, progress: ProgressDisplay) -> None:
        self._text, self._progress, self._typed = text, progress, ""
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
                    return self._typed
                self._typed = self._typed[:-1] if char in _ERASES else self._typed + char
                self._progress.show_answer(self._typed)
        except OSError:
            return ""
        return None
