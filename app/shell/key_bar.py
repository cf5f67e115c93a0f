"""The last line of every screen: what may be pressed, the most important always whole."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from app.shell.keys import EVERYWHERE, Key

_GAP = "   "


def key_line(keys: Sequence[Key], width: int, everywhere: Sequence[Key] = EVERYWHERE) -> Content:
    """Return the line for ``width`` cells: main key, as many others as fit, and at the right those of every screen."""
    right = Content(_GAP).join([_shown(key) for key in everywhere])
    ordered = sorted((key for key in keys if key.shown), key=lambda key: not key.main)
    left: list[Content] = []
    room = width - right.cell_length - len(_GAP)
    for key in ordered:
        part = _shown(key)
        taken = part.cell_length + (len(_GAP) if left else 0)
        if taken <= room or (key.main and not left):
            left.append(part)
            room -= taken
    return Content.assemble(Content(_GAP).join(left), " " * max(len(_GAP), room + len(_GAP)), right)


def _shown(key: Key) -> Content:
    press = Style.from_meta({"@click": key.action if "." in key.action else f"screen.{key.action}"})
    name, label = ("bold $text-primary", "bold") if key.main else ("$text-primary", "$text-muted")
    return Content.assemble((key.name, name), " ", (key.label, label)).stylize(press)


class KeyBar(Static):
    """Draws :func:`key_line` for its width."""

    DEFAULT_CSS = """
    KeyBar { dock: bottom; height: 1; padding: 0 1; background: $surface; text-wrap: nowrap; }
    """

    def __init__(self, keys: Sequence[Key], everywhere: Sequence[Key] = EVERYWHERE) -> None:
        super().__init__(markup=False)
        self.auto_links = False
        self._keys, self._everywhere = tuple(keys), tuple(everywhere)

    def offer(self, keys: Sequence[Key]) -> None:
        """Show other keys; does nothing where they are the same."""
        if tuple(keys) != self._keys:
            self._keys = tuple(keys)
            self.refresh()

    def render(self) -> Content:
        return key_line(self._keys, self.content_size.width, self._everywhere)
