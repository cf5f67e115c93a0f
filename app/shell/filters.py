"""Last word on what reaches the terminal: without colours where NO_COLOR is set, in pure ASCII with --ascii."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

_DRAWN = {
    "-": "─━╌╍┄┅┈┉═╴╶╸╺–—−‐‑▔▁⎯",
    "|": "│┃╎╏┆┇┊┋║╵╷╹╻▏▎▍▌▐▕⎸⎹",
    "+": "┌┐└┘├┤┬┴┼╭╮╰╯┏┓┗┛┣┫┳┻╋╔╗╚╝╠╣╦╩╬✓✔",
    "#": "█▇▆▅▄▃▂▉▊▋▀▓▛▜▙▟▘▝▖▗▚▞■◼",
    ":": "▒░",
    ">": "›»▶▸→❯▷",
    "<": "‹«◀◂←❮",
    "^": "↑▲△▴",
    "v": "↓▼▽▾",
    "*": "•●◉★∙⋅",
    "o": "○◯◦",
    "~": "◐◑◒◓≈",
    "x": "✗✘×✕",
    ".": "·…",
    "'": "‘’′",
    '"': "“”″",
    "=": "‖≡",
    "u": "µ",
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
