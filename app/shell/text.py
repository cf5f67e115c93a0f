"""Text on screens: what comes from outside is shown as it is, never obeyed; a state is a symbol, a word and a colour,
each readable without the others."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from textual.content import Content

from app.console import visible


def literal(text: object, style: str = "") -> Content:
    """Return text from outside in one line: escape codes written out, markup not parsed."""
    return Content.styled(visible(text), style) if style else Content(visible(text))


def muted(text: object) -> Content:
    """Return text that matters less."""
    return literal(text, "$text-muted")


def join(*parts: Content | str, between: str = "  ") -> Content:
    """Put parts side by side; empty ones are left out."""
    kept = [part if isinstance(part, Content) else Content(part) for part in parts if part]
    return Content(between).join(kept)


class _Look(NamedTuple):
    symbol: str
    plain: str
    """The symbol in ASCII."""
    word: str
    style: str
    """A style of the theme."""


class Mark(Enum):
    """A state that anything shown may be in."""

    OK = _Look("✓", "+", "ok", "$text-success")
    WARNING = _Look("▲", "!", "warning", "$text-warning")
    PROBLEM = _Look("✗", "x", "problem", "$text-error")
    ONLINE = _Look("●", "*", "online", "$text-success")
    OFFLINE = _Look("○", "o", "offline", "$text-muted")
    LOST = _Look("✗", "x", "lost", "$text-error")
    WORKING = _Look("◐", "~", "working", "$text-primary")
    WAITING = _Look("·", ".", "waiting", "$text-muted")
    ASKING = _Look("?", "?", "asks you", "$text-warning")
    SKIPPED = _Look("–", "-", "skipped", "$text-muted")
    CHOSEN = _Look("●", "x", "chosen", "$text-primary")
    NOT_CHOSEN = _Look("○", " ", "not chosen", "$text-muted")
    RUNNING = _Look("▶", ">", "running", "$text-success")
    PAUSED = _Look("‖", "=", "paused", "$text-warning")
    DONE = _Look("✓", "+", "done", "$text-success")
    STOPPED = _Look("■", "#", "stopped", "$text-muted")

    @property
    def style(self) -> str:
        return self.value.style

    def symbol(self, ascii_only: bool = False) -> str:
        """Return the one cell that stands for the state."""
        return self.value.plain if ascii_only else self.value.symbol

    def show(self, word: str | None = None, *, ascii_only: bool = False) -> Content:
        """Return symbol and word in the state's colour; another word, or ``""`` for the symbol alone."""
        text = self.value.word if word is None else word
        return Content.styled(f"{self.symbol(ascii_only)} {text}".rstrip(), self.style)


_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPINNER = "|/-\\"


def spinner(now: float, ascii_only: bool = False) -> str:
    """Return the frame that belongs to a time in seconds; four a second."""
    frames = _PLAIN_SPINNER if ascii_only else _SPINNER
    return frames[int(now * 4) % len(frames)]


def bar(share: float, cells: int, ascii_only: bool = False) -> str:
    """Return a bar of so many cells, filled by ``share`` (0 to 1)."""
    full = round(min(1.0, max(0.0, share)) * cells)
    filled, empty = ("#", ".") if ascii_only else ("━", "─")
    return filled * full + empty * (cells - full)
