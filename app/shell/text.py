"""Text on screens: what comes from outside is shown as it is, never obeyed."""

from __future__ import annotations

from textual.content import Content

from app.console import visible


def literal(text: object, style: str = "") -> Content:
    """Return text from outside in one line: escape codes written out, markup not parsed."""
    return Content.styled(visible(text), style) if style else Content(visible(text))


def lines(text: str, style: str = "") -> tuple[Content, ...]:
    """Return each line of a text from outside by itself."""
    return tuple(literal(line, style) for line in text.splitlines())


def muted(text: object) -> Content:
    """Return text that matters less."""
    return literal(text, "$text-muted")


def join(*parts: Content | str, between: str = "  ") -> Content:
    """Put parts side by side; empty ones are left out."""
    kept = [part if isinstance(part, Content) else Content(part) for part in parts if part]
    return Content(between).join(kept)
