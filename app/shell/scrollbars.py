"""Thin scroll bars that are drawn, so that they are seen without colours too."""

from __future__ import annotations

from rich.color import Color
from rich.segment import Segment, Segments
from rich.style import Style
from textual.scrollbar import ScrollBarRender

_BACK, _BAR = Color.parse("#555555"), Color.parse("bright_magenta")


class ThinBar(ScrollBarRender):
    """A thumb of heavy line; nothing where there is nothing to scroll."""

    @classmethod
    def render_bar(
        cls,
        size: int = 25,
        virtual_size: float = 50,
        window_size: float = 20,
        position: float = 0,
        thickness: int = 1,
        vertical: bool = True,
        back_color: Color = _BACK,
        bar_color: Color = _BAR,
    ) -> Segments:
        glyph, track = ("┃", "│") if vertical else ("━", "─")
        first, last = thumb(size, virtual_size, window_size, position)
        cells = []
        for place in range(size):
            on = first <= place < last
            click = "grab" if on else ("scroll_up" if place < first else "scroll_down")
            style = Style(color=bar_color if on else back_color, bold=on, meta={"@mouse.down": click})
            cells.append(Segment((glyph if on else track) * (thickness if vertical else 1), style))
        if vertical:
            return Segments(cells, new_lines=True)
        return Segments([*cells, Segment.line()] * thickness, new_lines=False)


def thumb(size: int, virtual_size: float, window_size: float, position: float) -> tuple[int, int]:
    """Return the first cell of the thumb and the one after its last."""
    if not (size and window_size and virtual_size > window_size):
        return 0, 0
    length = max(1, round(size * window_size / virtual_size))
    first = round((size - length) * min(1.0, position / (virtual_size - window_size)))
    return first, first + length
