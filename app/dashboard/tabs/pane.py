"""Base class of the tabs, texts that are drawn only when they change, and texts of members."""

from __future__ import annotations

from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content

from app.dashboard.reader import Picture
from app.run_view.headline import Level
from app.run_view.member_state import MemberState
from app.shell.folding import Prose
from app.shell.keys import Key
from app.shell.row_table import RowTable
from app.shell.text import StatusMark

LEVELS: dict[Level, StatusMark] = {
    "starting": StatusMark.WORKING,
    "good": StatusMark.OK,
    "warning": StatusMark.WARNING,
    "bad": StatusMark.PROBLEM,
    "paused": StatusMark.PAUSED,
    "done": StatusMark.DONE,
    "stopped": StatusMark.STOPPED,
}
_STATES = {
    "training": StatusMark.ONLINE,
    "done": StatusMark.DONE,
    "lost": StatusMark.LOST,
    "failed": StatusMark.PROBLEM,
    "left": StatusMark.STOPPED,
    "stopped": StatusMark.STOPPED,
    "paused": StatusMark.PAUSED,
}


class Words(Prose):
    """A text that is drawn only when it has changed: pictures come twice a second and rarely differ much."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._shown = Content("")
        self.auto_links = False

    def show(self, content: Content) -> None:
        """Show new content; does nothing where it is the same."""
        if not content.is_same(self._shown):
            self._shown = content
            self.update(content)


class Pane(Vertical):
    """One tab. A subclass draws a picture in :meth:`draw`."""

    SCOPED_CSS = False
    KEYS: ClassVar[tuple[Key, ...]] = ()
    """Keys of this tab alone; :meth:`press` gets their names."""
    ABOUT: ClassVar[str] = ""
    """Help text of the tab, as far as it is always the same."""

    picture: Picture | None = None
    """The picture that is shown."""

    def show(self, picture: Picture) -> None:
        """Show a new picture; a tab that has just been opened shows its earlier one until its size is known."""
        self.picture = picture
        if self.size:
            self.draw(picture)
        else:
            self.call_after_refresh(self.draw_again)

    def draw(self, picture: Picture) -> None:
        """Draw a picture."""

    def draw_again(self) -> None:
        """Draw the same picture again after a key has changed the view."""
        if self.picture is not None:
            self.draw(self.picture)

    def press(self, key: str) -> None:
        """Handle a key of :attr:`KEYS`."""

    def about(self) -> str:
        """Return the help text of the tab."""
        return self.ABOUT

    def copied(self) -> str:
        """Return what ``y`` copies: by default the row under the cursor; empty: nothing."""
        return next((table.row.plain for table in self.query(RowTable) if table.row), "")


def mark_of(member: MemberState, picture: Picture) -> tuple[StatusMark, str]:
    """Return symbol and word of a member's status."""
    status = picture.state.status_of(member)
    return _STATES.get(status, StatusMark.WORKING), status


def state_of(member: MemberState, picture: Picture) -> Content:
    """Return symbol and word of a member's status as content."""
    mark, word = mark_of(member, picture)
    return mark.show(word)


def shares_bar(member: MemberState, cells: int) -> Content:
    """Return a bar of compute and exposed wait."""
    compute, wait, _ = member.shares
    if compute + wait <= 0:
        return Content(" " * cells)
    full = min(cells, max(0, round(compute * cells)))
    return Content.assemble(("━" * full, "$text-success"), ("╌" * (cells - full), "$text-warning"))
