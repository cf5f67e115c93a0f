"""Jump mode: a letter on every row and field of a screen; pressing it jumps there, any other key cancels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.geometry import Offset
from textual.screen import ModalScreen
from textual.widgets import Static

LETTERS = "asdfghjklqwertyuiopzxcvbnmASDFGHJKLQWERTYUIOPZXCVBNM"


class JumpTarget(NamedTuple):
    """A row or field to jump to."""

    at: Offset
    """Screen position of its letter."""
    go: Callable[[], object]


class JumpScreen(ModalScreen[None]):
    """Transparent overlay with the letters."""

    DEFAULT_CSS = """
    JumpScreen { background: $background 0%; }
    JumpScreen .jump { position: absolute; width: 1; height: 1; background: $warning; color: $background;
                       text-style: bold reverse; }
    """

    def __init__(self, targets: Sequence[JumpTarget]) -> None:
        super().__init__()
        self._targets = dict(zip(LETTERS, targets, strict=False))

    def compose(self) -> ComposeResult:
        for letter, target in self._targets.items():
            label = Static(letter, classes="jump", markup=False)
            label.styles.offset = target.at
            yield label

    def on_key(self, event: events.Key) -> None:
        event.stop()
        target = self._targets.get(event.character or "")
        self.dismiss()
        if target is not None:
            self.app.call_later(target.go)
