"""How screens look on a terminal: the themes, and the last word on what reaches it: no colour code where NO_COLOR is
set, pure ASCII with --ascii, thin scroll bars that are seen without colours too."""

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


def _theme(place: int, name: str) -> Theme:
    roles: dict[str, Any] = {role: colours[place] for role, colours in _COLOURS.items()}
    variables = {role: colours[place] for role, colours in _VARIABLES.items()}
    return Theme(name, **roles, dark=name != "muster-light", variables=variables)


THEMES = tuple(_theme(place, name) for place, name in enumerate(_NAMES))
_ORDER = (*_NAMES, "ansi-dark", "ansi-light")
"""What ``t`` goes through; the last two use the sixteen colours of the terminal itself."""
FOR_ALL = {"cursor-line": "ansi_default", "text-muted": "ansi_default"}
"""Variables of ours that foreign themes lack."""


def theme_after(name: str) -> str:
    """Return the theme that ``t`` leads to."""
    place = _ORDER.index(name) if name in _ORDER else -1
    return _ORDER[(place + 1) % len(_ORDER)]


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
    """Return ASCII for one character, as many cells wide as it is."""
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
    """Return a text in ASCII that is as many cells wide."""
    return text if text.isascii() else "".join(map(ascii_character, text))


class PureAscii(LineFilter):
    """Every character that is not ASCII becomes one that is."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.text.isascii() else segment._replace(text=ascii_text(segment.text))
            for segment in segments
        ]


@lru_cache(maxsize=4096)
def colourless(style: Style) -> Style:
    """Return a style with its attributes (bold, reverse, ...) alone."""
    return style.without_color + Style.from_meta(style.meta) if style.meta else style.without_color


class WithoutColour(LineFilter):
    """No colour code at all; the stock filter leaves those for the default colours, and greys."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(text, style and colourless(style), control) for text, style, control in segments]


_BACK, _BAR = BarColor.parse("#555555"), BarColor.parse("bright_magenta")


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
        back_color: BarColor = _BACK,
        bar_color: BarColor = _BAR,
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
