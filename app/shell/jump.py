"""Jump mode: a letter on every row and field of a screen; pressing it goes there, any other key back."""

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
    """Where one can go to."""

    at: Offset
    """On the screen, of its letter."""
    go: Callable[[], object]


class JumpScreen(ModalScreen[None]):
    """The letters; what they lie over is seen as it was."""

    DEFAULT_CSS = """
    JumpScreen { background: $background 0%; }
    JumpScreen .jump { position: absolute; width: 1; height: 1; background: $warning; color: $background;
                       text-style: bold reverse; }
    """

    def __init__(self, places: Sequence[JumpTarget]) -> None:
        super().__init__()
        self._places = dict(zip(LETTERS, places, strict=False))

    def compose(self) -> ComposeResult:
        for letter, place in self._places.items():
            label = Static(letter, classes="jump", markup=False)
            label.styles.offset = place.at
            yield label

    def on_key(self, event: events.Key) -> None:
        event.stop()
        place = self._places.get(event.character or "")
        self.dismiss()
        if place is not None:
            self.app.call_later(place.go)
