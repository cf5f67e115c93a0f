"""What the tabs have in common: texts that are drawn when they change, and how members look on several of them."""

from __future__ import annotations

from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from app.dashboard.braille import sparkline
from app.dashboard.reader import Picture
from app.member_state import MemberState
from app.run_series import Series, of_member
from app.shell.keys import Key
from app.shell.row_table import RowTable
from app.shell.text import Mark
from app.verdict import Level

LEVELS: dict[Level, Mark] = {
    "starting": Mark.WORKING,
    "good": Mark.OK,
    "warning": Mark.WARNING,
    "bad": Mark.PROBLEM,
    "paused": Mark.PAUSED,
    "done": Mark.DONE,
    "stopped": Mark.STOPPED,
}
_STATES = {
    "training": Mark.ONLINE,
    "done": Mark.DONE,
    "lost": Mark.LOST,
    "failed": Mark.PROBLEM,
    "left": Mark.STOPPED,
    "stopped": Mark.STOPPED,
}


class Words(Static):
    """A text that is drawn only when it has changed: a picture comes twice a second, and most of it is the last one."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(markup=False, id=id)
        self._shown = Content("")
        self.auto_links = False

    def show(self, content: Content) -> None:
        """Show another content; does nothing where it is the same."""
        if not content.is_same(self._shown):
            self._shown = content
            self.update(content)


class Pane(Vertical):
    """One tab. A subclass says in :meth:`draw` how a picture looks."""

    SCOPED_CSS = False
    KEYS: ClassVar[tuple[Key, ...]] = ()
    """Keys that mean something on this tab alone; :meth:`press` is told their names."""
    ABOUT: ClassVar[str] = ""
    """What this tab shows, for the help."""

    picture: Picture | None = None
    """What is shown."""

    def show(self, picture: Picture) -> None:
        """Show another picture."""
        self.picture = picture
        self.draw(picture)

    def draw(self, picture: Picture) -> None:
        """Draw a picture."""

    def draw_again(self) -> None:
        """Draw the same picture after a key has changed how it is to look."""
        if self.picture is not None:
            self.draw(self.picture)

    def press(self, key: str) -> None:
        """Do what a key of :attr:`KEYS` means."""

    def copied(self) -> str:
        """Return what ``y`` copies from here: the row under the cursor; empty: nothing of its own."""
        return next((table.row.plain for table in self.query(RowTable) if table.row), "")


def state_of(member: MemberState, picture: Picture) -> Content:
    """Return symbol and word of a member's state."""
    if picture.state.status == "paused" and member.active:
        return Mark.PAUSED.show("paused")
    return _STATES.get(member.status, Mark.WORKING).show(member.status)


def seconds_text(seconds: float | None) -> str:
    """``4 s``, ``3 min``, ``2.1 h``: how long something is ago."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def sparks(picture: Picture, name: str, width: int) -> dict[int, str]:
    """Return each member's series over the whole run in one line, on one scale; blanks where it has no values."""
    ranks = list(picture.state.members)
    last = max((m.step for m in picture.state.members.values()), default=0)
    values = {rank: resampled(of_member(picture.state.curves, rank, name), last, width) for rank in ranks}
    top = max((value for row in values.values() for value in row if value is not None), default=0.0)
    return {rank: sparkline(row, width, top) for rank, row in values.items()}


def resampled(series: Series, last: int, width: int) -> list[float | None]:
    """Return ``width`` means of a series from step 0 to ``last``."""
    sums, counts = [0.0] * width, [0] * width
    scale = width / (last + 1)
    for bucket in series.buckets:
        first = min(width - 1, int(bucket.place * series.width * scale))
        final = min(width - 1, max(first, int(((bucket.place + 1) * series.width - 1) * scale)))
        for place in range(first, final + 1):
            sums[place] += bucket.mean
            counts[place] += 1
    found: list[float | None] = [sums[n] / counts[n] if counts[n] else None for n in range(width)]
    if last + 1 < width:  # fewer steps than cells: what lies between two steps is no gap
        for place in range(1, width):
            found[place] = found[place - 1] if found[place] is None else found[place]
    return found


def shares_bar(member: MemberState, cells: int) -> Content:
    """Return a bar of compute and exposed wait."""
    compute, wait, _ = member.shares
    if not member.window or compute + wait <= 0 or compute != compute:
        return Content(" " * cells)
    full = min(cells, max(0, round(compute * cells)))
    return Content.assemble(("━" * full, "$text-success"), ("╌" * (cells - full), "$text-warning"))
