"""The keys of a screen, declared once for bindings, the key bar (last line), the help and the palette; and the handling
of the terminal's size that all screens and dialogs share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Key as KeyEvent
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
    """A key and its action."""

    key: str
    """Textual's name of the key; several are separated by commas."""
    action: str
    label: str
    """One or two words for the key bar."""
    help: str = ""
    """One sentence; empty: the label."""
    main: bool = False
    """The primary key: shown first and never cut."""
    shown: bool = True
    """Whether it may appear in the key bar."""

    written: str = ""
    """Displayed name of the key; empty: derived from ``key``."""

    @property
    def id(self) -> str | None:
        """Name of the action in the user's key file; ``None`` if its key cannot be changed."""
        name = self.action.removeprefix("app.")
        return name if name.isidentifier() and name != "leave_at_once" else None

    def chosen(self, keymap: Mapping[str, str]) -> Key:
        """Return this key with the user's choice applied."""
        chosen_key = keymap.get(self.id or "")
        return replace(self, key=chosen_key, written="") if chosen_key else self

    @property
    def name(self) -> str:
        """Displayed name of the key."""
        key = self.key.split(",")[0]
        return self.written or NAMES.get(key, key)


EVERYWHERE = (
    Key("escape", "back", "Back", "Go back; no answer is lost."),
    Key("question_mark,f1", "help", "Help", "This help."),
    Key("ctrl+p", "command_palette", "Palette", "Find an action by typing a part of its name."),
)
"""Keys at the right of every key bar, never cut."""
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
"""Keys bound by screens, and keys bound by the application; ctrl+c cannot be changed."""


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """Return the Textual bindings of keys."""
    return [Binding(key.key, key.action, key.label, show=False, id=key.id) for key in keys]


def key_line(keys: Sequence[Key], width: int, everywhere: Sequence[Key] = EVERYWHERE) -> Content:
    """Return the key bar for ``width`` cells: main key, as many others as fit, at the right those of every screen."""
    right = Content(_GAP).join([_shown(key) for key in everywhere])
    ordered = sorted((key for key in keys if key.shown), key=lambda key: not key.main)
    left: list[Content] = []
    free_cells = width - right.cell_length - len(_GAP)
    for key in ordered:
        label = _shown(key)
        needed_cells = label.cell_length + (len(_GAP) if left else 0)
        if needed_cells <= free_cells or (key.main and not left):
            left.append(label)
            free_cells -= needed_cells
    return Content.assemble(Content(_GAP).join(left), " " * max(len(_GAP), free_cells + len(_GAP)), right)


def _shown(key: Key) -> Content:
    press = Style.from_meta({"@click": key.action if "." in key.action else f"screen.{key.action}"})
    name, label = ("bold $text-primary", "bold") if key.main else ("$text-primary", "$text-muted")
    return Content.assemble((key.name, name), " ", (key.label, label)).stylize(press)


class KeyBar(Static):
    """Draws :func:`key_line` for its width."""

    DEFAULT_CSS = """
    KeyBar { dock: bottom; height: 1; padding: 0 1; background: $surface; text-wrap: nowrap; }
    """

    def __init__(self, keys: Sequence[Key], right: Sequence[Key]) -> None:
        super().__init__(markup=False)
        self.auto_links = False
        self._offered = tuple(keys), tuple(right)

    def offer(self, keys: Sequence[Key], right: Sequence[Key]) -> None:
        """Replace the keys."""
        offered = tuple(keys), tuple(right)
        if offered != self._offered:
            self._offered = offered
            self.refresh()

    def render(self) -> Content:
        keymap = app_of(self).keymap
        keys, everywhere = ([key.chosen(keymap) for key in group] for group in self._offered)
        return key_line(keys, self.content_size.width, everywhere)


LEAST = Size(72, 20)
WIDE, WIDEST, TALL = 100, 140, 40
"""Columns, and lines, from which a screen shows more side by side, or below."""


def too_small(size: Size) -> bool:
    """Whether a terminal of this size cannot hold a screen."""
    return size.width < LEAST.width or size.height < LEAST.height


class TooSmall(Static):
    """Covers a screen while the terminal is too small; the screen keeps its focus and its selection."""

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
        message = f"Too small: {width}x{height}, needs {LEAST.width}x{LEAST.height}."
        alternative = f"Or: {app_of(self).headless_command()}"
        if len(alternative) > width:  # broken over two lines it could not be copied
            alternative = app_of(self).brief_command()
        separator = " " if len(message) + len(alternative) < width else "\n"
        return Content(f"{message}{separator}{alternative}")


def fit(screen: Screen[Any], size: Size) -> None:
    """Give a screen the CSS classes of a size: ``-too-small``, ``-narrow``, ``-wide``, ``-widest``."""
    wide, widest = size.width >= WIDE, size.width >= WIDEST
    classes = {"-too-small": too_small(size), "-narrow": not wide, "-wide": wide, "-widest": widest}
    screen.update_classes(classes, animate=False)


_DELAY = (0.18, 0.8)
"""Shortest and longest time in seconds before a keyboard repeats a held key."""
_INTERVAL = (0.01, 0.12)
"""Shortest and longest time in seconds between two repeats; shorter: a program wrote both at once."""
_INTERVALS = 2
"""Intervals by which repeats are recognised."""


@dataclass(frozen=True)
class Press:
    """One key that a terminal sent; tells the repeats of a held key by their times.

    A keyboard sends a held key at once, again after a delay, and then at short intervals. No terminal says which are
    repeats. Keys that are typed fast, or by a program, come without that delay.
    """

    event: KeyEvent
    times: list[float]
    """Times in seconds of this press and the others of its key, with no other key between; it grows."""
    index: int
    """Of this press in ``times``."""

    def followed_by(self, event: KeyEvent) -> Press:
        """Return the press that comes next."""
        if event.key != self.event.key:
            return pressed(event)
        self.times.append(event.time)
        return Press(event, self.times, len(self.times) - 1)

    def held_since(self) -> float | None:
        """Return when the key was pressed of which this is a repeat; ``None``: this is a press of its own."""
        first, last = self._burst()
        if not self._follows_delay(first):
            return None
        gaps = [after - before for before, after in pairwise(self.times[first : last + 1])]
        return self.times[first - 1] if sum(gap >= _INTERVAL[0] for gap in gaps) >= _INTERVALS else None

    def undecided_until(self) -> float:
        """Return the time until which more presses can show that this one is a repeat; 0: it is known already."""
        first, last = self._burst()
        may_grow = last == len(self.times) - 1 and self._follows_delay(first) and self.held_since() is None
        return self.times[last] + _INTERVAL[1] if may_grow else 0.0

    def _burst(self) -> tuple[int, int]:
        """Return the first and the last index of the presses around this one that came in quick succession."""
        first = last = self.index
        while first > 0 and self.times[first] - self.times[first - 1] <= _INTERVAL[1]:
            first -= 1
        while last + 1 < len(self.times) and self.times[last + 1] - self.times[last] <= _INTERVAL[1]:
            last += 1
        return first, last

    def _follows_delay(self, index: int) -> bool:
        times: Sequence[float] = self.times
        return index > 0 and _DELAY[0] <= times[index] - times[index - 1] <= _DELAY[1]


def pressed(event: KeyEvent) -> Press:
    """Return the press of a key after another one."""
    return Press(event, [event.time], 0)
