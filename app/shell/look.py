"""Appearance of screens: the themes, and the final filters of the output: no colour codes if NO_COLOR is set, ASCII
only with --ascii, thin scroll bars that are visible without colours too."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Any

from rich.cells import cell_len
from rich.color import Color as BarColor
from rich.segment import Segment, Segments
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.scrollbar import ScrollBarRender
from textual.theme import Theme

_COLOURS = {  # dark, light, contrast
    "primary": ("#7fb4ff", "#1b5fb8", "#66b3ff"),
    "secondary": ("#9d8cff", "#6546c3", "#c0a8ff"),
    "accent": ("#63d2c0", "#0f7d6e", "#00ffd0"),
    "success": ("#8fd18a", "#2c7a2c", "#5dff5d"),
    "warning": ("#e8c06d", "#8a5a00", "#ffd75f"),
    "error": ("#f0857d", "#b3261e", "#ff8080"),
    "foreground": ("#d6dce5", "#20262e", "#ffffff"),
    "background": ("#12151a", "#fbfbf9", "#000000"),
    "surface": ("#191d24", "#f2f2ee", "#000000"),
    "panel": ("#222833", "#e7e8e3", "#1c1c1c"),
}
_VARIABLES = {
    "border": ("#2c3441", "#cfd2cb", "#808080"),
    "text-muted": ("#8b96a6", "#5f6874", "#c0c0c0"),
    "cursor-line": ("#232c3a", "#dde8f7", "#333333"),
}
_NAMES = ("muster-dark", "muster-light", "muster-contrast")


def _theme(index: int, name: str) -> Theme:
    roles: dict[str, Any] = {role: colours[index] for role, colours in _COLOURS.items()}
    variables = {role: colours[index] for role, colours in _VARIABLES.items()}
    return Theme(name, **roles, dark=name != "muster-light", variables=variables)


THEMES = tuple(_theme(index, name) for index, name in enumerate(_NAMES))
_ORDER = (*_NAMES, "ansi-dark", "ansi-light")
"""Themes that ``t`` cycles through; the last two use the terminal's own sixteen colours."""
FOR_ALL = {"cursor-line": "ansi_default", "text-muted": "ansi_default"}
"""Defaults of our variables for themes that lack them."""


def theme_after(name: str) -> str:
    """Return the theme after ``name``."""
    index = _ORDER.index(name) if name in _ORDER else -1
    return _ORDER[(index + 1) % len(_ORDER)]


_DRAWN = {
    "-": "─╍┄┅┈┉═╴╶╸╺–—−‐‑▔▃⎯",
    "|": "│┃╎╏┆┇┊┋║╵╷╹╻▏▎▍▌▐▕⎸⎹",
    "+": "┌┐└┘├┤┬┼╭╮╰╯┏┓┗┛┣┫┳┻╋╔╗╚╝╠╣╦╩╬✓✔▆",
    "#": "█▉▊▋▀▓▛▜▙▟▘▝▖▗▚▞■◼━",
    ":": "▒░",
    ">": "›»▶▸→❯▷",
    "<": "‹«◀◂←❮",
    "^": "↑△▴",
    "v": "↓▼▽▾",
    "*": "•●◉★∙⋅▇",
    "o": "○◯◦",
    "~": "◐◑◒◓≈▄",
    "x": "✗✘×✕",
    ".": "·…╌▂",
    "'": "‘’′┴",
    '"': "“”″",
    "=": "‖≡▅",
    "u": "µ",
    "_": "▁",
    "!": "▲",
    "e": "◆",
    "s": "◇",
}
_TABLE = {character: plain for plain, characters in _DRAWN.items() for character in characters}


@lru_cache(maxsize=4096)
def ascii_character(character: str) -> str:
    """Return an ASCII equivalent of one character, of the same width in cells."""
    if character.isascii():
        return character
    if character in _TABLE:
        return _TABLE[character]
    if "\u2800" <= character <= "\u28ff":  # braille: drawn points
        return " " if character == "\u2800" else "*"
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    width = cell_len(character)
    return plain if plain and len(plain) == width else "?" * width


@lru_cache(maxsize=4096)
def ascii_text(text: str) -> str:
    """Return an ASCII equivalent of a text, of the same width in cells."""
    return text if text.isascii() else "".join(map(ascii_character, text))


class PureAscii(LineFilter):
    """Replaces every character that is not ASCII."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.text.isascii() else segment._replace(text=ascii_text(segment.text))
            for segment in segments
        ]


@lru_cache(maxsize=4096)
def colourless(style: Style) -> Style:
    """Return a style with only its attributes (bold, reverse, ...)."""
    return style.without_color + Style.from_meta(style.meta) if style.meta else style.without_color


class WithoutColour(LineFilter):
    """Removes all colour codes; Textual's filter leaves greys and those for the default colours."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(text, style and colourless(style), control) for text, style, control in segments]


_BACK, _BAR = BarColor.parse("#555555"), BarColor.parse("bright_magenta")


class ThinBar(ScrollBarRender):
    """A scroll bar whose thumb is a heavy line; empty if there is nothing to scroll."""

    @classmethod
    def render_bar(
        cls,
        size: int = 25,
        virtual_size: float = 50,
        window_size: float = 20,
        position: float = 0,
        thickness: int = 1,
        vertical: bool = True,
        back_color: BarColor = _BACK,
        bar_color: BarColor = _BAR,
    ) -> Segments:
        glyph, track = ("┃", "│") if vertical else ("━", "─")
        start, end = thumb(size, virtual_size, window_size, position)
        segments = []
        for cell in range(size):
            on = start <= cell < end
            click = "grab" if on else ("scroll_up" if cell < start else "scroll_down")
            style = Style(color=bar_color if on else back_color, bold=on, meta={"@mouse.down": click})
            segments.append(Segment((glyph if on else track) * (thickness if vertical else 1), style))
        if vertical:
            return Segments(segments, new_lines=True)
        return Segments([*segments, Segment.line()] * thickness, new_lines=False)


def thumb(size: int, virtual_size: float, window_size: float, position: float) -> tuple[int, int]:
    """Return the first cell of the thumb and the cell after its last."""
    if not (size and window_size and virtual_size > window_size):
        return 0, 0
    length = max(1, round(size * window_size / virtual_size))
    start = round((size - length) * min(1.0, position / (virtual_size - window_size)))
    return start, start + length
