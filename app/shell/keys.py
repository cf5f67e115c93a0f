"""The keys of a screen, declared once: they become bindings, the key bar (its last line), the help and the palette.
And what every screen and every dialog does alike: it follows the size of the terminal, and says if it is too small."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.screen import Screen
from textual.style import Style
from textual.widgets import Static

from app.shell.terminal_app import app_of

_GAP = "   "
NAMES = {
    "escape": "esc",
    "question_mark": "?",
    "ctrl+p": "^p",
    "slash": "/",
    "plus": "+",
    "minus": "-",
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
    def id(self) -> str | None:
        """The name by which a person gives this action another key; none where it depends on what it is about."""
        name = self.action.removeprefix("app.")
        return name if name.isidentifier() and name != "leave_at_once" else None

    def chosen(self, keymap: Mapping[str, str]) -> Key:
        """Return it with the key that a person chose."""
        own = keymap.get(self.id or "")
        return replace(self, key=own, written="") if own else self

    @property
    def name(self) -> str:
        """The key as it is written for a person."""
        key = self.key.split(",")[0]
        return self.written or NAMES.get(key, key)


EVERYWHERE = (
    Key("escape", "back", "Back", "Go back; no answer is lost."),
    Key("question_mark,f1", "help", "Help", "This help."),
    Key("ctrl+p", "command_palette", "Palette", "Find an action by typing a part of its name."),
)
"""These stand at the right of every key bar, always whole."""
BESIDES = (
    Key("slash", "filter", "Filter", "Show only the rows that contain what you type; esc ends it."),
    Key("r", "retry", "Retry", "Retry what failed, or check again."),
    Key("y", "copy", "Copy", "Copy what is selected: a command, a value, a row."),
    Key("e", "headless", "Command", "The command that does the same without this screen."),
    Key("J", "jump", "Jump", "Show a letter on every row and field; pressing it goes there."),
    Key("g", "app.command_log", "Log", "What was run where: every action, and every command on a machine."),
    Key("t", "next_theme", "Theme", "Switch to other colours."),
    Key("q,ctrl+q", "leave", "Leave", "Leave; a run goes on in the background."),
    Key("ctrl+c", "leave_at_once", "Leave at once", "Leave at once, even if something is running."),
)
OF_SCREENS, OF_APPS = (*EVERYWHERE[:2], *BESIDES[:6]), BESIDES[6:-1]
"""Those that a screen binds, and those that its application binds; ctrl+c is nobody's to change."""


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """Return the bindings of some keys."""
    return [Binding(key.key, key.action, key.label, show=False, id=key.id) for key in keys]


def key_line(keys: Sequence[Key], width: int, everywhere: Sequence[Key] = EVERYWHERE) -> Content:
    """Return the line for ``width`` cells: main key, as many others as fit, and at the right those of every screen."""
    right = Content(_GAP).join([_shown(key) for key in everywhere])
    ordered = sorted((key for key in keys if key.shown), key=lambda key: not key.main)
    left: list[Content] = []
    room = width - right.cell_length - len(_GAP)
    for key in ordered:
        part = _shown(key)
        taken = part.cell_length + (len(_GAP) if left else 0)
        if taken <= room or (key.main and not left):
            left.append(part)
            room -= taken
    return Content.assemble(Content(_GAP).join(left), " " * max(len(_GAP), room + len(_GAP)), right)


def _shown(key: Key) -> Content:
    press = Style.from_meta({"@click": key.action if "." in key.action else f"screen.{key.action}"})
    name, label = ("bold $text-primary", "bold") if key.main else ("$text-primary", "$text-muted")
    return Content.assemble((key.name, name), " ", (key.label, label)).stylize(press)


class KeyBar(Static):
    """Draws :func:`key_line` for its width."""

    DEFAULT_CSS = """
    KeyBar { dock: bottom; height: 1; padding: 0 1; background: $surface; text-wrap: nowrap; }
    """

    def __init__(self, keys: Sequence[Key], everywhere: Sequence[Key] = EVERYWHERE) -> None:
        super().__init__(markup=False)
        self.auto_links = False
        self._keys, self._everywhere = tuple(keys), tuple(everywhere)

    def offer(self, keys: Sequence[Key]) -> None:
        """Show other keys; does nothing where they are the same."""
        if tuple(keys) != self._keys:
            self._keys = tuple(keys)
            self.refresh()

    def render(self) -> Content:
        own = app_of(self).keymap
        keys, everywhere = ([key.chosen(own) for key in some] for some in (self._keys, self._everywhere))
        return key_line(keys, self.content_size.width, everywhere)


LEAST = Size(72, 20)
WIDE, WIDEST = 100, 140


def too_small(size: Size) -> bool:
    """Whether a terminal of this size cannot hold a screen."""
    return size.width < LEAST.width or size.height < LEAST.height


class TooSmall(Static):
    """Lies over a screen while the terminal is too small; what is under it keeps its focus and its selection."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    TooSmall {
        layer: above; display: none; width: 100%; height: 100%; dock: top; background: $background;
        content-align: center middle; text-align: center; text-wrap: nowrap;
    }
    .-too-small TooSmall { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)

    def render(self) -> Content:
        width, height = self.app.size
        said = f"Too small: {width}x{height}, needs {LEAST.width}x{LEAST.height}."
        other = f"Or: {app_of(self).headless_command()}"
        return Content(f"{said} {other}" if len(said) + len(other) < width else f"{said}\n{other}")


def fit(screen: Screen[Any], size: Size) -> None:
    """Give a screen the classes that belong to a size: ``-too-small``, ``-narrow``, ``-wide``, ``-widest``."""
    wide, widest = size.width >= WIDE, size.width >= WIDEST
    classes = {"-too-small": too_small(size), "-narrow": not wide, "-wide": wide, "-widest": widest}
    screen.update_classes(classes, animate=False)
