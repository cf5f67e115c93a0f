"""Machines as boxes and the links between them as lines, in the cells of a terminal. Pure.

The thicker a line, the faster the link; a cable is a whole line, Wi-Fi is dashed, and where no connection is possible,
so that traffic is relayed, it is dotted. The rate stands on a line where there is room for it. Nothing is told by a
colour alone.
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

from app.shell.text import DOTS, literal, muted, together
from profiles.quantities import rate_figure

FEWEST, MOST = 2, 8
"""Machines of which there is a map."""
IDEAL = {2: 3, 3: 9, 4: 11, 5: 13, 6: 15, 7: 17, 8: 19}
"""Lines by the number of machines, from which on more would show nothing more."""
_ROOMY = {3: (40, 6), 4: (44, 7), 5: (70, 9), 6: (76, 11), 7: (100, 15), 8: (110, 17)}
"""Cells and lines below which so many machines would be a tangle."""
_CROWD = 6
"""Machines from which on lines are drawn thinner, all alike."""
_LONGEST_NAME = 16
_CLASSES = (100.0, 500.0, 2000.0)
"""Mbit/s from which on a line is a point thicker."""
_PLAIN = ".-+#"
"""In ASCII: by thickness."""
_PLACES = (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74)
"""Where a rate may stand on its line, the best place first."""


class LinkMedium(Enum):
    """What a link goes over, and how it looks: ``on`` points are drawn, then ``off`` left out."""

    CABLE = "cable", "━━━", 1, 0, "$text-primary"
    AIR = "Wi-Fi", "╍ ╍", 6, 4, "$text-warning"
    RELAY = "relayed", "· ·", 2, 4, "$text-error"

    def __init__(self, word: str, sample: str, on: int, off: int, style: str) -> None:
        self.word, self.sample, self.on, self.off, self.style = word, sample, on, off, style


@dataclass(frozen=True)
class MapLink:
    """The link between two machines."""

    one: str
    other: str
    kind: LinkMedium
    mbit: float = 0.0
    """In one direction ..."""
    back: float = 0.0
    """... and in the other; 0: not known."""

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.one, self.other))

    @property
    def thickness(self) -> int:
        """Points across; the slower direction decides, as it does for an exchange."""
        slower = min(self.mbit, self.back or self.mbit)
        return 1 if self.kind is LinkMedium.RELAY else 1 + sum(slower >= bound for bound in _CLASSES)

    @property
    def label(self) -> str:
        """``941``, or ``94-211`` where the directions differ much."""
        slow, fast = sorted((self.mbit, self.back or self.mbit))
        if self.kind is LinkMedium.RELAY or fast <= 0:
            return self.kind.word if self.kind is LinkMedium.RELAY else ""
        return f"{rate_figure(slow)}-{rate_figure(fast)}" if fast > 1.5 * slow else rate_figure(slow)


class _Box(NamedTuple):
    left: int
    top: int
    width: int
    height: int

    @property
    def centre(self) -> tuple[float, float]:
        return self.left + self.width / 2, self.top + self.height / 2

    def meets(self, other: _Box, across: int, down: int) -> bool:
        """Whether there is less room than so many cells between the two."""
        apart = self.left >= other.left + other.width + across or other.left >= self.left + self.width + across
        return not (apart or self.top >= other.top + other.height + down or other.top >= self.top + self.height + down)

    def cells(self) -> Iterator[tuple[int, int]]:
        return (
            (x, y) for y in range(self.top, self.top + self.height) for x in range(self.left, self.left + self.width)
        )


def drawn(
    names: Sequence[str], lines: Sequence[MapLink], width: int, height: int, *, chosen: Collection[str] = (),
    ascii_only: bool = False,
) -> Content:  # fmt: skip
    """Return the map, in at most so many cells; empty where there is no room for it.

    Args:
        names: of the machines, the first one at the top.
        lines: of which those between other machines are left out.
        chosen: the two machines of the link that stands out.
        ascii_only: draw lines without braille, whose points would all look alike.
    """
    boxes = _boxes(names, width, min(height, IDEAL.get(len(names), 0)))
    if not boxes:
        return Content("")
    thinner = int(len(names) >= _CROWD)
    canvas = _Canvas(ascii_only, {cell for box in boxes.values() for cell in box.cells()}, thinner)
    known = [line for line in lines if line.one in boxes and line.other in boxes]
    known.sort(key=lambda line: (line.ends == frozenset(chosen), line.mbit))
    for line in known:
        canvas.draw(line, boxes[line.one], boxes[line.other], line.ends == frozenset(chosen))
    for line in reversed(known):
        canvas.write_rate(line, boxes[line.one], boxes[line.other], line.ends == frozenset(chosen))
    for name, box in boxes.items():
        canvas.write_box(name, box, name in chosen)
    bottom = max(box.top + box.height for box in boxes.values())
    return Content("\n").join(canvas.line(y, width) for y in range(bottom))


def legend(lines: Sequence[MapLink]) -> Content:
    """Return what the lines mean, of those that there are."""
    kinds = [kind for kind in LinkMedium if any(line.kind is kind for line in lines)]
    parts = [Content.assemble((kind.sample, kind.style), " ", muted(kind.word)) for kind in kinds]
    unit = [muted("Mbit/s; the thicker, the faster")] if any(line.mbit for line in lines) else []
    return Content("   ").join([*parts, *unit])


def _boxes(names: Sequence[str], width: int, height: int) -> dict[str, _Box]:
    """Return where the machines stand, around an ellipse; none where there is no room."""
    count = len(names)
    least = _ROOMY.get(count, (0, 0))
    if not FEWEST <= count <= MOST or len(set(names)) < count or width < least[0] or height < least[1]:
        return {}
    across = min(width, 24 + 5 * height) if count > 2 else min(width, 60)
    wide = max(min(_LONGEST_NAME, cell_len(literal(name).plain)) for name in names) + 4
    for tall in (3, 1):
        if across < wide or height < tall:
            continue
        found = [_Box(round(x * (across - wide)), round(y * (height - tall)), wide, tall) for x, y in _places(count)]
        if not any(one.meets(other, 2 if tall == 1 else 3, 1) for one, other in combinations(found, 2)):
            return dict(zip(names, found, strict=True))
    return {}


def _places(count: int) -> list[tuple[float, float]]:
    """Return where so many stand around a circle, clockwise, the first one at the top, each 0 to 1."""
    if count == 2:
        return [(0.0, 0.5), (1.0, 0.5)]
    first = -math.pi / 2 - (math.pi / count if count % 2 == 0 else 0)
    angles = [first + 2 * math.pi * place / count for place in range(count)]
    xs, ys = [round(math.cos(a), 6) for a in angles], [round(math.sin(a), 6) for a in angles]
    return [
        ((x - min(xs)) / (max(xs) - min(xs)), (y - min(ys)) / (max(ys) - min(ys))) for x, y in zip(xs, ys, strict=True)
    ]


@dataclass
class _Canvas:
    """Cells of points, and of characters over them."""

    ascii_only: bool
    taken: set[tuple[int, int]]
    """Cells of boxes and rates."""
    thinner: int = 0
    """Points by which every line is thinner than it would be."""
    bits: dict[tuple[int, int], int] = field(default_factory=dict)
    looks: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    """Thickness and style of the line on top."""
    owners: dict[tuple[int, int], set[frozenset[str]]] = field(default_factory=dict)
    texts: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    """Characters with their styles; what a wide one covers is an empty text."""

    def draw(self, line: MapLink, one: _Box, other: _Box, chosen: bool) -> None:
        """Draw a link from the middle of a box to that of another."""
        fine_x, fine_y = (1, 1) if self.ascii_only else (2, 4)
        (x0, y0), (x1, y1) = ((box.centre[0] * fine_x, box.centre[1] * fine_y) for box in (one, other))
        length = max(1.0, math.hypot(x1 - x0, y1 - y0))
        way, scale = line.kind, 2 if self.ascii_only else 1
        on, off = -(-way.on // scale), way.off // scale
        flat = abs(x1 - x0) >= abs(y1 - y0)
        thick = 1 if self.ascii_only else max(1, line.thickness - self.thinner)
        across = [n - (thick - 1) / 2 for n in range(thick)]
        style = f"bold {way.style}" if chosen else way.style
        for step in range(int(2 * length) + 1):
            if (step / 2) % (on + off) >= on:
                continue
            x, y = x0 + (x1 - x0) * step / 2 / length, y0 + (y1 - y0) * step / 2 / length
            for aside in across:
                point = (int(x + (0 if flat else aside)), int(y + (aside if flat else 0)))
                self._point(*point, line, style)

    def _point(self, x: int, y: int, line: MapLink, style: str) -> None:
        cell = (x, y) if self.ascii_only else (x // 2, y // 4)
        if cell in self.taken or min(cell) < 0:
            return
        self.bits[cell] = self.bits.get(cell, 0) | (1 if self.ascii_only else DOTS[y % 4][x % 2])
        self.looks[cell] = (line.thickness, style)
        self.owners.setdefault(cell, set()).add(line.ends)

    def write_rate(self, line: MapLink, one: _Box, other: _Box, chosen: bool) -> None:
        """Write the rate on a link where it hides no other one; that of the chosen link in any case."""
        if not line.label:
            return
        (x0, y0), (x1, y1) = one.centre, other.centre
        for careful in (True, False) if chosen else (True,):
            for text in (f" {line.label} Mbit/s ", f" {line.label} "):
                if "Mbit/s" in text and (line.kind is LinkMedium.RELAY or abs(x1 - x0) < len(text) + 26):
                    continue
                for place in _PLACES:
                    left = round(x0 + (x1 - x0) * place - len(text) / 2)
                    cells = [(left + n, int(y0 + (y1 - y0) * place)) for n in range(len(text))]
                    if self._is_free(cells, line.ends, careful):
                        self._write(cells, text, "bold" if chosen else "")
                        self.taken.update(cells)
                        return

    def _is_free(self, cells: Sequence[tuple[int, int]], ends: frozenset[str], careful: bool) -> bool:
        beside = [(cells[0][0] - 1, cells[0][1]), (cells[-1][0] + 1, cells[-1][1])]
        if cells[0][0] < 0 or any(cell in self.taken for cell in (*cells, *beside)):
            return False
        return not careful or all(self.owners.get(cell, {ends}) <= {ends} for cell in cells)

    def write_box(self, name: str, box: _Box, chosen: bool) -> None:
        """Write a machine's box; a low one is a name in brackets."""
        room = box.width - 4
        shown = literal(name).truncate(room, ellipsis=True).plain
        spare = room - cell_len(shown)
        inner = " " * (spare // 2) + shown + " " * (spare - spare // 2)
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
        """Return one line, up to its last sign."""
        last = max((x for x, row in (*self.texts, *self.bits) if row == y), default=-1)
        return together(self._cell((x, y)) for x in range(min(width, last + 1)))

    def _cell(self, cell: tuple[int, int]) -> tuple[str, str]:
        if cell in self.texts:
            return self.texts[cell]
        if cell not in self.bits:
            return " ", ""
        thickness, style = self.looks[cell]
        return _PLAIN[thickness - 1] if self.ascii_only else chr(0x2800 + self.bits[cell]), style
