"""Map of machines (boxes) and the links between them (lines) in the cells of a terminal; pure functions.

The thicker a line, the faster the link; a cable is solid, Wi-Fi is dashed, and a relayed link, between machines that
cannot connect, is dotted. What leads through a router or a VPN is
drawn in long dashes. The rate is written on a line if there is space for it. Nothing is conveyed by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import NamedTuple

from rich.cells import cell_len
from textual.content import Content

from app.console import short_names
from app.shell.text import DOTS, literal, muted, together
from profiles.quantities import mbit_text, rate_figure

FEWEST, MOST = 2, 8
"""Fewest and most machines for which a map is drawn."""
IDEAL = {2: 3, 3: 9, 4: 11, 5: 13, 6: 15, 7: 17, 8: 19}
"""Height in lines, by number of machines, beyond which a map gains nothing in a terminal that is not wide."""
_LARGE = 110
"""Width in cells from which a map is half as high again and spells out longer names."""
_ROOMY = {3: (40, 6), 4: (44, 7), 5: (70, 9), 6: (76, 11), 7: (100, 15), 8: (110, 17)}
"""Minimum width and height, in cells and lines, by number of machines."""
_CROWD = 6
"""Number of machines from which all lines are drawn thinner."""
_LONGEST_NAME, _SPELT_NAME = 16, 24
"""Cells of a name in a box, and in a wide terminal in which the boxes leave most of the width to the lines."""
_LINES_SHARE = 0.4
_CLASSES = (100.0, 500.0, 2000.0)
"""Rates in Mbit/s above which a line is one dot thicker each."""
_PLAIN = ".-+#"
"""ASCII characters by thickness."""
_RATE_POSITIONS = (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74)
"""Positions of a rate on its line, as fractions of its length, in order of preference."""


class LinkMedium(Enum):
    """Medium of a link and its line style: ``on`` dots are drawn, then ``off`` left out."""

    CABLE = "cable", "━━━", 1, 0, "$text-primary"
    AIR = "Wi-Fi", "╍ ╍", 6, 4, "$text-warning"
    ROUTED = "router or VPN", "━ ╸", 10, 2, "$text-accent"
    RELAY = "relayed", "· ·", 2, 4, "$text-error"

    def __init__(self, word: str, sample: str, on: int, off: int, style: str) -> None:
        self.word, self.sample, self.on, self.off, self.style = word, sample, on, off, style


@dataclass(frozen=True)
class MapLink:
    """The link between two machines, as drawn."""

    source: str
    target: str
    kind: LinkMedium
    mbit: float = 0.0
    """From source to target."""
    reverse_mbit: float = 0.0
    """From target to source; 0: unknown."""

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.source, self.target))

    @property
    def thickness(self) -> int:
        """Width of the line in dots, from the slower direction, which also determines the time of an exchange."""
        slower = min(self.mbit, self.reverse_mbit or self.mbit)
        return 1 if self.kind is LinkMedium.RELAY else 1 + sum(slower >= bound for bound in _CLASSES)

    @property
    def labels(self) -> tuple[str, ...]:
        """``941 Mbit/s`` and ``941``, or ``94-211 Mbit/s`` and ``94-211`` if the directions differ a lot."""
        slow, fast = sorted((self.mbit, self.reverse_mbit or self.mbit))
        if self.kind is LinkMedium.RELAY or fast <= 0:
            return (self.kind.word,) if self.kind is LinkMedium.RELAY else ()
        if fast <= 1.5 * slow:
            return mbit_text(slow), rate_figure(slow)
        return f"{rate_figure(slow)}-{mbit_text(fast)}", f"{rate_figure(slow)}-{rate_figure(fast)}"


class _Box(NamedTuple):
    left: int
    top: int
    width: int
    height: int

    @property
    def centre(self) -> tuple[float, float]:
        return self.left + self.width / 2, self.top + self.height / 2

    def overlaps(self, box: _Box, margin_x: int, margin_y: int) -> bool:
        """Whether the boxes overlap or have less than a margin of so many cells between them."""
        is_left = self.left + self.width + margin_x <= box.left
        is_right = self.left >= box.left + box.width + margin_x
        is_above = self.top + self.height + margin_y <= box.top
        is_below = self.top >= box.top + box.height + margin_y
        return not (is_left or is_right or is_above or is_below)

    def cells(self) -> Iterator[tuple[int, int]]:
        return (
            (x, y) for y in range(self.top, self.top + self.height) for x in range(self.left, self.left + self.width)
        )


def drawn(
    names: Sequence[str], lines: Sequence[MapLink], width: int, height: int, *, chosen: Collection[str] = (),
    ascii_only: bool = False,
) -> Content:  # fmt: skip
    """Return the map, in at most ``width`` by ``height`` cells; empty if it does not fit.

    Args:
        names: of the machines, the first one at the top.
        lines: links; those to machines not in ``names`` are left out.
        chosen: the two machines of the highlighted link.
        ascii_only: draw lines without braille, whose dots would all become the same character.
    """
    ideal = IDEAL.get(len(names), 0)
    boxes = _boxes(names, width, min(height, ideal * 3 // 2 if width >= _LARGE and len(names) > 2 else ideal))
    if not boxes:
        return Content("")
    thinner = int(len(names) >= _CROWD)
    canvas = _Canvas(ascii_only, {cell for box in boxes.values() for cell in box.cells()}, thinner)
    shown = [line for line in lines if line.source in boxes and line.target in boxes]
    shown.sort(key=lambda line: (line.ends == frozenset(chosen), line.mbit))
    for line in shown:
        canvas.draw(line, boxes[line.source], boxes[line.target], line.ends == frozenset(chosen))
    for line in reversed(shown):
        canvas.write_rate(line, boxes[line.source], boxes[line.target], line.ends == frozenset(chosen))
    labels = short_names([literal(name).plain for name in boxes], max(box.width for box in boxes.values()) - 4)
    for (name, box), label in zip(boxes.items(), labels):
        canvas.write_box(label, box, name in chosen)
    bottom = max(box.top + box.height for box in boxes.values())
    return Content("\n").join(canvas.line(y, width) for y in range(bottom))


def legend(lines: Sequence[MapLink]) -> Content:
    """Return the legend of the media that occur."""
    kinds = [kind for kind in LinkMedium if any(line.kind is kind for line in lines)]
    entries = [Content.assemble((kind.sample, kind.style), " ", muted(kind.word)) for kind in kinds]
    unit = [muted("Mbit/s; the thicker, the faster")] if any(line.mbit for line in lines) else []
    return Content("   ").join([*entries, *unit])


def _boxes(names: Sequence[str], width: int, height: int) -> dict[str, _Box]:
    """Return the boxes of the machines, around an ellipse; empty if they do not fit."""
    count = len(names)
    min_size = _ROOMY.get(count, (0, 0))
    if not FEWEST <= count <= MOST or len(set(names)) < count or width < min_size[0] or height < min_size[1]:
        return {}
    across = min(width, 24 + 5 * height) if count > 2 else min(width, 100 if width >= _LARGE else 60)
    longest = max(cell_len(literal(name).plain) for name in names)
    for most, tall in ((_SPELT_NAME, 3), (_LONGEST_NAME, 3), (_LONGEST_NAME, 1)):
        wide = min(most, longest) + 4
        if across < wide or height < tall or (most > _LONGEST_NAME and 2 * wide > (1 - _LINES_SHARE) * across):
            continue
        boxes = [_Box(round(x * (across - wide)), round(y * (height - tall)), wide, tall) for x, y in _circle(count)]
        if not any(a.overlaps(b, 2 if tall == 1 else 3, 1) for a, b in combinations(boxes, 2)):
            return dict(zip(names, boxes, strict=True))
    return {}


def _circle(count: int) -> list[tuple[float, float]]:
    """Return so many points on a circle, clockwise, the first one at the top; coordinates from 0 to 1."""
    if count == 2:
        return [(0.0, 0.5), (1.0, 0.5)]
    start_angle = -math.pi / 2 - (math.pi / count if count % 2 == 0 else 0)
    angles = [start_angle + 2 * math.pi * i / count for i in range(count)]
    xs, ys = [round(math.cos(a), 6) for a in angles], [round(math.sin(a), 6) for a in angles]
    return [
        ((x - min(xs)) / (max(xs) - min(xs)), (y - min(ys)) / (max(ys) - min(ys))) for x, y in zip(xs, ys, strict=True)
    ]


@dataclass
class _Canvas:
    """A grid of cells with dots, and with characters over them."""

    ascii_only: bool
    taken: set[tuple[int, int]]
    """Cells of boxes and rates."""
    thinner: int = 0
    """Dots by which every line is made thinner."""
    bits: dict[tuple[int, int], int] = field(default_factory=dict)
    looks: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    """Thickness and style of the topmost line."""
    owners: dict[tuple[int, int], set[frozenset[str]]] = field(default_factory=dict)
    texts: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    """Characters with their styles; a cell covered by a wide character to its left has an empty text."""

    def draw(self, line: MapLink, source: _Box, target: _Box, chosen: bool) -> None:
        """Draw a link from the centre of one box to that of another."""
        fine_x, fine_y = (1, 1) if self.ascii_only else (2, 4)
        (x0, y0), (x1, y1) = ((box.centre[0] * fine_x, box.centre[1] * fine_y) for box in (source, target))
        length = max(1.0, math.hypot(x1 - x0, y1 - y0))
        medium, scale = line.kind, 2 if self.ascii_only else 1
        on, off = -(-medium.on // scale), medium.off // scale
        is_flat = abs(x1 - x0) >= abs(y1 - y0)
        thickness = 1 if self.ascii_only else max(1, line.thickness - self.thinner)
        offsets = [n - (thickness - 1) / 2 for n in range(thickness)]
        style = f"bold {medium.style}" if chosen else medium.style
        for step in range(int(2 * length) + 1):
            if (step / 2) % (on + off) >= on:
                continue
            x, y = x0 + (x1 - x0) * step / 2 / length, y0 + (y1 - y0) * step / 2 / length
            for offset in offsets:
                point = (int(x + (0 if is_flat else offset)), int(y + (offset if is_flat else 0)))
                self._point(*point, line, style)

    def _point(self, x: int, y: int, line: MapLink, style: str) -> None:
        cell = (x, y) if self.ascii_only else (x // 2, y // 4)
        if cell in self.taken or min(cell) < 0:
            return
        self.bits[cell] = self.bits.get(cell, 0) | (1 if self.ascii_only else DOTS[y % 4][x % 2])
        self.looks[cell] = (line.thickness, style)
        self.owners.setdefault(cell, set()).add(line.ends)

    def write_rate(self, line: MapLink, source: _Box, target: _Box, chosen: bool) -> None:
        """Write the rate on a link if it hides no other link; that of the chosen link in any case."""
        (x0, y0), (x1, y1) = source.centre, target.centre
        for avoid_lines in (True, False) if chosen else (True,):
            for text in (f" {label} " for label in line.labels):
                if "bit/s" in text and (line.kind is LinkMedium.RELAY or abs(x1 - x0) < len(text) + 26):
                    continue
                for position in _RATE_POSITIONS:
                    left = round(x0 + (x1 - x0) * position - len(text) / 2)
                    cells = [(left + n, int(y0 + (y1 - y0) * position)) for n in range(len(text))]
                    if self._is_free(cells, line.ends, avoid_lines):
                        self._write(cells, text, "bold" if chosen else "")
                        self.taken.update(cells)
                        return

    def _is_free(self, cells: Sequence[tuple[int, int]], ends: frozenset[str], avoid_lines: bool) -> bool:
        neighbours = [(cells[0][0] - 1, cells[0][1]), (cells[-1][0] + 1, cells[-1][1])]
        if cells[0][0] < 0 or any(cell in self.taken for cell in (*cells, *neighbours)):
            return False
        return not avoid_lines or all(self.owners.get(cell, {ends}) <= {ends} for cell in cells)

    def write_box(self, name: str, box: _Box, chosen: bool) -> None:
        """Write a machine's box; one of a single line is a name in brackets."""
        name_width = box.width - 4
        label = literal(name).truncate(name_width, ellipsis=True).plain
        padding = name_width - cell_len(label)
        inner = " " * (padding // 2) + label + " " * (padding - padding // 2)
        edge = "bold $text-primary" if chosen else "$text-muted"
        middle = box.top + box.height // 2
        if box.height > 1:
            self._text(box.left, box.top, "╭" + "─" * (box.width - 2) + "╮", edge)
            self._text(box.left, box.top + 2, "╰" + "─" * (box.width - 2) + "╯", edge)
        sides = ("│ ", " │") if box.height > 1 else ("[ ", " ]")
        self._text(box.left, middle, sides[0], edge)
        self._text(box.left + 2, middle, inner, "bold")
        self._text(box.left + box.width - 2, middle, sides[1], edge)

    def _text(self, x: int, y: int, text: str, style: str) -> None:
        cells: list[tuple[int, int]] = []
        signs: list[str] = []
        for sign in text:
            size = cell_len(sign)
            cells += [(x + len(cells) + n, y) for n in range(size)]
            signs += [sign, *[""] * (size - 1)] if size else []
        self._write(cells, signs, style)

    def _write(self, cells: Sequence[tuple[int, int]], signs: Sequence[str], style: str) -> None:
        self.texts.update({cell: (sign, style) for cell, sign in zip(cells, signs, strict=True)})

    def line(self, y: int, width: int) -> Content:
        """Return one line, up to its last character."""
        last_x = max((x for x, row in (*self.texts, *self.bits) if row == y), default=-1)
        return together(self._cell((x, y)) for x in range(min(width, last_x + 1)))

    def _cell(self, cell: tuple[int, int]) -> tuple[str, str]:
        if cell in self.texts:
            return self.texts[cell]
        if cell not in self.bits:
            return " ", ""
        thickness, style = self.looks[cell]
        return _PLAIN[thickness - 1] if self.ascii_only else chr(0x2800 + self.bits[cell]), style
