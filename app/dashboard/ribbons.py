"""A line for each machine under a curve, on its axis: what the machine did when the curve went up or down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content

from app.console import short_names, visible
from app.dashboard.braille import Window
from app.dashboard.pane import mark_of
from app.dashboard.reader import Picture
from app.member_state import TROUBLE, MemberState
from app.ribbon import Ribbon, most_notable, ribbons, shares
from app.shell.text import StatusMark, literal, together

LEVELS = "▁▃▄▅▇"
"""By the share of the time in which a machine computed; five that stay different in ASCII."""
WENT, CAME, SNAPSHOT, ABSENT = "✗", "+", "◇", "·"
BESIDE = 13
"""Cells at the right, of samples/s and the share of waiting."""
_LONGEST = 16
"""Cells at the left."""


@dataclass(frozen=True)
class Strip:
    """One machine: what is drawn of it, and what stands beside that."""

    ribbon: Ribbon
    name: str
    mark: StatusMark
    words: str
    """Instead of a ribbon before the first step."""
    beside: str
    trouble: bool


def strips(picture: Picture) -> tuple[Strip, ...]:
    """Return the strips of all machines."""
    members = picture.state.members
    return tuple(_strip(one, members[one.rank], picture) for one in ribbons(picture.state))


def _strip(ribbon: Ribbon, member: MemberState, picture: Picture) -> Strip:
    mark, word = mark_of(member, picture)
    rate, wait = member.samples_per_second, member.shares[1]
    if member.active and member.window and picture.state.status != "paused":
        word = f"{min(rate, 99999):6.1f}/s{wait:4.0%}" if rate == rate and wait == wait else ""
    preparing = member.preparing if len(picture.state.members) > 1 else ""  # of one alone the headline says it
    words = member.message if not member.active and member.message else preparing or member.device
    return Strip(ribbon, picture.name(member.rank), mark, words, word, member.status in TROUBLE)


def margin(every: Sequence[Strip], width: int, least: int) -> int:
    """Return the cells at the left that the names take: at most a third of the width, unless the axis needs more."""
    longest = max((cell_len(visible(one.name)) for one in every), default=0) + 2
    return max(least, min(longest, _LONGEST, width // 3))


def strip_lines(
    every: Sequence[Strip], window: Window | None, left: int, across: int, room: int, beside: int
) -> list[Content]:
    """Return the lines of as many machines as there is room for, and if some are left out, how many.

    Args:
        window: of the curve above; ``None``: there is none yet.
        left, across, beside: cells of the names, the ribbons, and what stands at the right.
    """
    told = room < len(every) and room > 1
    shown = most_notable([one.ribbon for one in every], room - told)
    ranks = {one.rank for one in shown}
    names = short_names([visible(one.name) for one in every], left - 2)
    lines = [_line(one, name, window, left, across, beside)
             for one, name in zip(every, names) if one.ribbon.rank in ranks]  # fmt: skip
    if told:
        lines.append(literal(f"{'':{left}} ... and {len(every) - len(shown)} more on tab 2", "$text-muted"))
    return lines


def _line(one: Strip, short: str, window: Window | None, left: int, across: int, beside: int) -> Content:
    name = literal(short, "bold")
    drawn = _drawn(one, window, across) if window else None
    style = "$text-error" if one.trouble else "$text-muted"
    ribbon = together(drawn) if drawn else literal(one.words, style).truncate(across, ellipsis=True)
    line: list[Content | str | tuple[str, str]] = [
        one.mark.show(""),
        " ",
        name.pad_right(max(0, left - 2 - name.cell_length)),
        ("│", "$text-muted"),
        ribbon,
    ]
    if beside:
        line.append(Content(" " * max(0, across - ribbon.cell_length)))
        line.append(literal(f"{one.beside[: beside - 1]:>{beside}}", style))
    return Content.assemble(*line)


def _drawn(one: Strip, window: Window, across: int) -> list[tuple[str, str]] | None:
    """Return the cells of a ribbon; ``None`` where there is nothing to draw."""
    ribbon = one.ribbon
    if ribbon.waits.current is None and not ribbon.away:
        return None

    def place(step: float) -> int:
        return min(across - 1, max(0, int(window.across(step) * across)))

    cells = [(" ", "")] * across
    waited = shares(ribbon.waits, window.left, window.right, across)
    for cell, share in enumerate(waited):
        if share is not None:
            level = LEVELS[min(4, max(0, round((1 - share) * 4)))]
            cells[cell] = (level, "$text-success 60%" if share < 0.5 else "$text-warning 60%")
    for away in ribbon.away:
        if away.until >= window.left and away.start <= window.right:
            first, until = place(away.start), place(away.until if away.until < window.right else window.right)
            why = "".join(sign if cell_len(sign) == 1 else "?" for sign in visible(away.text))
            text = f"{why[: until - first]:{ABSENT}<{until - first}}"
            cells[first + 1 : until + 1] = [(sign, "$text-muted") for sign in text]
    written = [step for step in ribbon.snapshots if window.left <= step <= window.right]
    for step in written if 4 * len(written) <= across else ():
        cells[place(step)] = (SNAPSHOT, "$text-accent")
    for step in (away.start for away in ribbon.away):  # over a snapshot in the same cell
        if window.left <= step <= window.right:
            cells[place(step)] = (WENT, "bold $text-error")
    for step in ribbon.arrivals:
        if window.left <= step <= window.right:
            cells[place(step)] = (CAME, "bold $text-success")
    begin = next((cell for cell, share in enumerate(waited) if share is not None), 0)
    if ribbon.arrivals and not any(
        away.start <= ribbon.arrivals[0] for away in ribbon.away
    ):  # it came when others trained
        cells[:begin] = [cell if cell[0] == CAME else (ABSENT, "$text-muted") for cell in cells[:begin]]
    return cells
