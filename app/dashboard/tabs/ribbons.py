"""A line for each machine under a curve, on the same axis: what the machine did over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content

from app.console import short_names, visible
from app.dashboard.braille import Window
from app.dashboard.reader import Picture
from app.dashboard.tabs.pane import mark_of
from app.run_view.member_state import TROUBLE, MemberState
from app.run_view.ribbon import Ribbon, most_notable, ribbons, shares
from app.shell.text import StatusMark, literal, together
from profiles.quantities import share_text, throughput_figure

LEVELS = "▁▃▄▅▇"
"""Signs by the share of computing; five, which stay distinct in ASCII."""
WENT, CAME, SNAPSHOT, ABSENT = "✗", "+", "◇", "·"
FIGURES_WIDTH = 15
"""Cells of the figures at the right: samples/s and the share of waiting."""
_LONGEST = 16
"""Most cells of the names at the left."""


@dataclass(frozen=True)
class Strip:
    """One machine: its ribbon, and the words at both sides."""

    ribbon: Ribbon
    name: str
    mark: StatusMark
    words: str
    """Text instead of a ribbon before the first step."""
    figures: str
    """Shown at the right: samples/s and the share of waiting, or the status."""
    trouble: bool


def strips(picture: Picture) -> tuple[Strip, ...]:
    """Return the strips of all machines."""
    members = picture.state.members
    return tuple(_strip(ribbon, members[ribbon.rank], picture) for ribbon in ribbons(picture.state))


def _strip(ribbon: Ribbon, member: MemberState, picture: Picture) -> Strip:
    mark, word = mark_of(member, picture)
    if member.active and member.rate is not None and word != "paused":
        word = f"{throughput_figure(min(member.rate, 99999)):>6}/s{share_text(member.shares[1]):>6}"
    preparing = (
        member.preparing(picture.now) if len(picture.state.members) > 1 else ""
    )  # of one alone the headline says it
    name = picture.name(member.rank)
    why = member.message.removeprefix(f"{name}: ")  # it stands beside the words
    words = why if not member.active and why else preparing or member.device
    return Strip(ribbon, name, mark, words, word, member.status in TROUBLE)


def margin(shown: Sequence[Strip], width: int, minimum: int) -> int:
    """Return the width of the names at the left: at most a third of the width, but at least ``minimum``."""
    longest = max((cell_len(visible(strip.name)) for strip in shown), default=0) + 2
    return max(minimum, min(longest, _LONGEST, width // 3))


def strip_lines(
    all_strips: Sequence[Strip], window: Window | None, left: int, across: int, max_lines: int, figures_width: int
) -> list[Content]:
    """Return at most ``max_lines`` lines of machines; the last one counts those that are left out.

    Args:
        window: of the curve above; ``None``: there is none.
        left, across, figures_width: cells of the names, the ribbons, and the figures at the right.
    """
    counts_omitted = max_lines < len(all_strips) and max_lines > 1
    shown = most_notable([strip.ribbon for strip in all_strips], max_lines - counts_omitted)
    ranks = {ribbon.rank for ribbon in shown}
    names = short_names([visible(strip.name) for strip in all_strips], left - 2)
    lines = [_line(strip, name, window, left, across, figures_width)
             for strip, name in zip(all_strips, names) if strip.ribbon.rank in ranks]  # fmt: skip
    if counts_omitted:
        lines.append(literal(f"{'':{left}} ... and {len(all_strips) - len(shown)} more on tab 2", "$text-muted"))
    return lines


def _line(strip: Strip, short: str, window: Window | None, left: int, across: int, figures_width: int) -> Content:
    name = literal(short, "bold")
    drawn = _drawn(strip, window, across) if window else None
    style = "$text-error" if strip.trouble else "$text-muted"
    ribbon = together(drawn) if drawn else literal(strip.words, style).truncate(across, ellipsis=True)
    line: list[Content | str | tuple[str, str]] = [
        strip.mark.show(""),
        " ",
        name.pad_right(max(0, left - 2 - name.cell_length)),
        ("│", "$text-muted"),
        ribbon,
    ]
    if figures_width:
        line.append(Content(" " * max(0, across - ribbon.cell_length)))
        line.append(literal(f"{strip.figures[: figures_width - 1]:>{figures_width}}", style))
    return Content.assemble(*line)


def _drawn(strip: Strip, window: Window, across: int) -> list[tuple[str, str]] | None:
    """Return the cells of a ribbon; ``None`` where there is nothing to draw."""
    ribbon = strip.ribbon
    if ribbon.waits.current is None and not ribbon.away:
        return None

    def column_of(step: float) -> int:
        return min(across - 1, max(0, int(window.across(step) * across)))

    cells = [(" ", "")] * across
    waited = shares(ribbon.waits, window.left, window.right, across)
    for cell, share in enumerate(waited):
        if share is not None:
            level = LEVELS[min(4, max(0, round((1 - share) * 4)))]
            cells[cell] = (level, "$text-success 60%" if share < 0.5 else "$text-warning 60%")
    for away in ribbon.away:
        if away.until >= window.left and away.start <= window.right:
            start, stop = column_of(away.start), column_of(away.until if away.until < window.right else window.right)
            why = "".join(sign if cell_len(sign) == 1 else "?" for sign in visible(away.text))
            room = stop - start - (away.until in ribbon.arrivals)
            text = f"{_whole_words(why, away.status, room):{ABSENT}<{stop - start}}"
            cells[start + 1 : stop + 1] = [(sign, "$text-muted") for sign in text]
    written = [step for step in ribbon.snapshots if window.left <= step <= window.right]
    for step in written if 4 * len(written) <= across else ():
        cells[column_of(step)] = (SNAPSHOT, "$text-accent")
    for step in (away.start for away in ribbon.away):  # drawn over a snapshot in the same cell
        if window.left <= step <= window.right:
            cells[column_of(step)] = (WENT, "bold $text-error")
    for step in ribbon.arrivals:
        if window.left <= step <= window.right:
            cells[column_of(step)] = (CAME, "bold $text-success")
    begin = next((cell for cell, share in enumerate(waited) if share is not None), 0)
    if ribbon.arrivals and not any(
        away.start <= ribbon.arrivals[0] for away in ribbon.away
    ):  # it came when others trained
        cells[:begin] = [cell if cell[0] == CAME else (ABSENT, "$text-muted") for cell in cells[:begin]]
    return cells


def _whole_words(reason: str, status: str, room: int) -> str:
    """Return as many whole words of a reason as fit into ``room`` cells, or at least the status it begins with."""
    if len(reason) <= room:
        return reason
    words = reason[: max(0, room)].rpartition(" ")[0].rstrip(":,;")
    return f"{words}…" if len(words) > len(status) else status if len(status) <= room else ""
