"""A text that is drawn only when it has changed: a picture is made twice a second, and most of it is the last one."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


class Words(Static):
    """Shows a content."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(markup=False, id=id, classes=classes)
        self._shown = Content("")
        self.auto_links = False

    def show(self, content: Content) -> None:
        """Show another content; does nothing where it is the same."""
        if not content.is_same(self._shown):
            self._shown = content
            self.update(content)
