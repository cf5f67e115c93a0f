"""The keys of a screen, declared once: they become bindings, the key bar, the help and the palette."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from textual.binding import Binding, BindingType

NAMES = {
    "enter": "enter",
    "escape": "esc",
    "question_mark": "?",
    "ctrl+p": "^p",
    "slash": "/",
    "plus": "+",
    "minus": "-",
    "space": "space",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
}


@dataclass(frozen=True)
class Key:
    """One key and what it does here."""

    key: str
    """As Textual names it; several may be parted by commas."""
    action: str
    label: str
    """One or two words for the key bar."""
    help: str = ""
    """One sentence; the label where it is empty."""
    main: bool = False
    """The key that leads on: shown first and always whole."""
    shown: bool = True
    """Whether it may stand in the key bar."""

    written: str = ""
    """How the key is written, where that is not its own name."""

    @property
    def name(self) -> str:
        """The key as it is written for a person."""
        return self.written or shown_name(self.key.split(",")[0])


def shown_name(key: str) -> str:
    """Return how a key is written for a person."""
    return NAMES.get(key, key)


EVERYWHERE = (
    Key("escape", "back", "Back", "Go back; no answer is lost."),
    Key("question_mark", "help", "Help", "This help."),
    Key("ctrl+p", "command_palette", "Palette", "Find an action by typing a part of its name."),
)
"""These stand at the right of every key bar, always whole."""
BESIDES = (
    Key("slash", "filter", "Filter", "Show only the rows that contain what you type; esc ends it."),
    Key("r", "retry", "Retry", "Retry what failed, or check again."),
    Key("y", "copy", "Copy", "Copy what is selected: a command, a value, a row."),
    Key("e", "headless", "Command", "The command that does the same without this screen."),
    Key("g", "command_log", "Log", "All commands that were run, by machine."),
    Key("t", "next_theme", "Theme", "Other colours."),
    Key("q,ctrl+q", "leave", "Leave", "Leave; a run goes on without this screen."),
    Key("ctrl+c", "leave_at_once", "Leave at once", "Leave at once, even if something is running."),
)


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """Return the bindings of some keys."""
    return [Binding(key.key, key.action, key.label, show=False) for key in keys]
