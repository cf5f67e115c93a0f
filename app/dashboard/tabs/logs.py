"""The fifth tab: the logs of all machines, and above them the root cause of the errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Key as KeyPress
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual
from textual.widgets import Input

from app.console import short_names, visible
from app.dashboard.log_book import LogLine
from app.dashboard.reader import Picture
from app.dashboard.tabs.pane import Pane, Words
from app.run_view.headline import problems
from app.run_view.timeline import TimelineEntry, entry_text
from app.shell.folding import folded
from app.shell.keys import WIDE, Key
from app.shell.text import StatusMark, literal
from profiles.errors import counted
from profiles.installation import command_about
from profiles.quantities import clock_text

_NAME, _WIDE_NAME = 12, 24
"""Most cells of a machine's name, in a narrow and in a wide terminal."""
_CLOCK = 9
"""Cells of the time before a line."""
_LEAST_TEXT = 20
"""Fewest cells of a text beside time and name."""
_FOLLOWING = 2
"""Most later errors that are listed under the root cause."""
_BEFORE = 30.0
"""Seconds before a loss within which errors in the logs may be its cause."""
_AFTER = 10.0
"""Seconds within which what happens to other machines may follow from a problem: silence is noticed after 5 s."""
_STYLES = {"error": "$text-error", "warning": "$text-warning", "info": ""}


class LogView(ScrollView, can_focus=True):
    """Log lines, the newest at the bottom, long ones over several rows; it follows them until it is scrolled up."""

    DEFAULT_CSS = "LogView { height: 1fr; background: $background; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", show=False),
        Binding("down,j", "scroll_down", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: Sequence[LogLine] = ()
        self._machines: list[str] = []
        self._search_text = ""
        self._rows: list[tuple[LogLine, int]] = []
        """Each row of the view: its line, and which piece of its text."""
        self._pieces: dict[int, list[str]] = {}
        """Texts by line number, divided to fit :attr:`_widths`."""
        self._widths = (0, 0)
        """Cells of the view, and of the names."""
        self._follows, self._moving = True, False

    def show(self, lines: Sequence[LogLine], search_text: str) -> None:
        """Show these lines; ``search_text`` is marked in them."""
        is_unchanged = len(lines) == len(self._lines) and (not lines or lines[-1].number == self._lines[-1].number)
        if is_unchanged and search_text == self._search_text:
            return
        self._lines, self._search_text = lines, search_text
        self._machines = sorted({line.machine for line in lines})
        self._fold()

    def _fold(self) -> None:
        """Divide the lines into rows; the visible ones stay in place while old ones are dropped."""
        index = min(self.scroll_offset.y, len(self._rows) - 1)
        first_number = self._rows[index][0].number if index >= 0 else 0
        width, cells = self.scrollable_content_region.width, _WIDE_NAME if self.app.size.width >= WIDE else _NAME
        widths = (width, min(cells, max(map(cell_len, self._machines), default=0)))
        if widths != self._widths or len(self._pieces) > 2 * len(self._lines):
            self._pieces, self._widths = {}, widths
        self._rows = [(line, piece) for line in self._lines for piece in range(len(self._pieces_of(line)))]
        self._moving = True
        self.virtual_size = Size(width, len(self._rows))
        if not self._follows:
            index = next((n for n, (line, _) in enumerate(self._rows) if line.number >= first_number), 0)
            self.scroll_to(y=index, animate=False, immediate=True)
        self._moving = False
        self._to_end()
        self.refresh()

    def _pieces_of(self, line: LogLine) -> list[str]:
        if line.number not in self._pieces:
            is_plain = line.text.isascii() and line.text.isprintable()  # as most are, of up to 16,000 lines
            text, (width, cells) = line.text if is_plain else visible(line.text), self._widths
            room = max(_LEAST_TEXT, width - cells - 1 - (_CLOCK if line.time is not None else 0))
            fits = len(text) <= room if is_plain else cell_len(text) <= room
            self._pieces[line.number] = [text] if fits else folded(text, room)
        return self._pieces[line.number]

    def _to_end(self) -> None:
        if self._follows:
            self._moving = True
            self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True)
            self._moving = False

    def on_resize(self) -> None:
        self._fold()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._moving:
            self._follows = new_value >= self.max_scroll_y - 0.5

    def line_at(self, y: int) -> LogLine | None:
        """Return the line on a row of the widget."""
        index = y + self.scroll_offset.y
        return self._rows[index][0] if 0 <= index < len(self._rows) else None

    def render(self) -> str:
        return ""

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        line = self.line_at(y)
        if line is None:
            return Strip.blank(width, self.visual_style.rich_style)
        content = self._content(line, self._rows[y + self.scroll_offset.y][1]).truncate(width, ellipsis=True)
        strips = Visual.to_strips(self, content, width, 1, self.visual_style, pad=True, apply_selection=False)
        return strips[0] if strips else Strip.blank(width)

    def _content(self, line: LogLine, piece: int) -> Content:
        words = literal(self._pieces_of(line)[piece], _STYLES[line.level])
        if self._search_text:
            words = words.highlight_regex(f"(?i){re.escape(self._search_text)}", style="reverse")
        cells = self._widths[1]
        if piece:
            return Content.assemble(" " * (cells + 1 + (_CLOCK if line.time is not None else 0)), words)
        short_name = short_names(self._machines, cells)[self._machines.index(line.machine)]
        name = literal(short_name, "$text-primary")
        at = f"{clock_text(line.time)} " if line.time is not None else ""
        return Content.assemble((at, "$text-muted"), name, " " * (cells + 1 - name.cell_length), words)


class SearchLine(Input):
    """The search field of the logs."""

    DEFAULT_CSS = """
    SearchLine { height: 1; border: none; padding: 0 1; background: $surface; display: none; }
    SearchLine:focus { border: none; }
    SearchLine.-open { display: block; }
    """

    def on_key(self, event: KeyPress) -> None:
        if event.key == "escape":
            event.stop()
            self.value = ""
            self.close()

    def open(self) -> None:
        """Show the field and focus it."""
        self.cursor_blink = False
        self.add_class("-open")
        self.focus()

    def close(self) -> None:
        """Focus the lines; an empty field is hidden."""
        self.set_class(bool(self.value), "-open")
        self.screen.query_one(LogView).focus()


class LogsPane(Pane):
    """Root cause, filter line, log lines."""

    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("m", "pane('m')", "Machine", "Only the next machine; after the last one, all."),
        Key("l", "pane('l')", "Level", "Warnings and errors, errors alone, or everything."),
    )
    ABOUT = (
        "The logs of all machines, newest last; '/' searches. Above them: the earliest problem that is not over, "
        "from which those after it may follow."
    )
    DEFAULT_CSS = "LogsPane Words { height: auto; } LogsPane #cause { display: none; padding-bottom: 1; }"
    LEVELS = (("info", "warning", "error"), ("warning", "error"), ("error",))

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._machine = ""
        self._level = 0
        self._sieved: tuple[object, list[LogLine]] = ((), [])

    def compose(self) -> ComposeResult:
        yield Words(id="cause")
        yield Words(id="sieve")
        yield LogView(id="lines")
        yield SearchLine(placeholder="search: only lines that contain this; esc ends it", select_on_focus=False)

    def draw(self, picture: Picture) -> None:
        cause = self.query_one("#cause", Words)
        pinned = root_cause(picture)
        cause.display = pinned is not None
        if pinned is not None:
            cause.show(pinned)
        search_text = self.query_one(SearchLine).value
        lines = self._sieve(picture.lines, search_text)
        self.query_one("#sieve", Words).show(self._words(picture, len(lines), search_text))
        self.query_one(LogView).show(lines, search_text)

    def about(self) -> str:
        """Return the help text, with the command that holds nothing back."""
        everything = f" `{command_about(self.picture.path, 'runs', 'logs')}` writes everything." if self.picture else ""
        return self.ABOUT + everything

    def press(self, key: str) -> None:
        if key == "l":
            self._level = (self._level + 1) % len(self.LEVELS)
        elif key == "m" and self.picture is not None:
            machines = ["", *sorted({line.machine for line in self.picture.lines})]
            index = machines.index(self._machine) if self._machine in machines else 0
            self._machine = machines[(index + 1) % len(machines)]
        self.draw_again()

    def search(self) -> None:
        """Open the search field."""
        self.query_one(SearchLine).open()

    def on_input_changed(self) -> None:
        self.draw_again()

    def on_input_submitted(self) -> None:
        self.query_one(SearchLine).close()

    def copied(self) -> str:
        line = self.query_one(LogView).line_at(self.query_one(LogView).size.height - 1)
        return line.text if line else ""

    def _sieve(self, lines: Sequence[LogLine], search_text: str) -> list[LogLine]:
        key = (lines[-1].number if lines else 0, len(lines), search_text, self._machine, self._level)
        if self._sieved[0] != key:
            levels, text = self.LEVELS[self._level], search_text.casefold()
            matching = [
                line
                for line in lines
                if line.level in levels
                and (not self._machine or line.machine == self._machine)
                and (not text or text in line.text.casefold() or text in line.machine.casefold())
            ]
            self._sieved = (key, matching)
        return self._sieved[1]

    def _words(self, picture: Picture, count: int, search_text: str) -> Content:
        level = ("all levels", "warnings and errors", "errors")[self._level]
        filters = [self._machine or "all machines", level, *([f"with '{search_text}'"] if search_text else [])]
        none = "" if picture.lines else "; nothing was logged yet" if picture.live else "; nothing was logged"
        lines = [f"{', '.join(filters)}: {counted(count, 'line')}{none}"]
        if picture.omits_lines:
            lines[0] += f", of the newest {counted(len(picture.lines), 'line')}"
            lines.append(
                f"{picture.totals.text(self._machine)}; to read them: {command_about(picture.path, 'runs', 'logs')}"
            )
        return Content("\n").join(literal(line, "$text-muted") for line in lines)


def root_cause(picture: Picture) -> Content | None:
    """Return the earliest problem that holds, what may follow from it, and others that do not; ``None``: none holds."""
    chains = _chains(problems(picture.state))
    if not chains:
        return None
    lines = _chain_lines("root cause", chains[0], picture, _errors_before(picture.lines, chains[0][0].time))
    for chain in chains[1 : 1 + _FOLLOWING]:
        lines += _chain_lines("another cause", chain, picture)
    if len(chains) > 1 + _FOLLOWING:
        lines.append(literal(f"  and {counted(len(chains) - 1 - _FOLLOWING, 'other problem')}", "$text-muted"))
    return Content("\n").join(lines)


def _chains(entries: Sequence[TimelineEntry]) -> list[list[TimelineEntry]]:
    """Divide problems, oldest first, into causes, each with what may follow from it: what happens to the same machine,
    or to others within :data:`_AFTER`."""
    chains: list[list[TimelineEntry]] = []
    for entry in entries:
        causes = (chain for chain in chains if entry.member == chain[0].member or entry.time <= chain[0].time + _AFTER)
        if chain := next(causes, None):
            chain.append(entry)
        else:
            chains.append([entry])
    return chains


def _chain_lines(
    title: str, chain: Sequence[TimelineEntry], picture: Picture, before: Sequence[tuple[float, str, str]] = ()
) -> list[Content]:
    """Return the lines of a cause and what follows; ``before``: errors in the logs that may have led to it."""
    causes = [*before, *((entry.time, entry_text(entry, picture.name), entry.hint) for entry in chain)]
    (at, words, hint), *after = causes
    head = StatusMark.PROBLEM.show(title).stylize("bold")
    lines = [Content.assemble(head, (f"  {clock_text(at)}  ", "$text-muted"), literal(words, "bold $text-error"))]
    if hint:
        lines.append(literal(f"  {hint}", "$text-accent"))
    lines += [literal(f"  then {clock_text(moment)} {text}", "$text-muted") for moment, text, _ in after[:_FOLLOWING]]
    if len(after) > _FOLLOWING:
        lines.append(literal(f"  and {len(after) - _FOLLOWING} more that followed", "$text-muted"))
    return lines


def _errors_before(lines: Sequence[LogLine], problem: float) -> list[tuple[float, str, str]]:
    """Return the errors in the logs shortly before a problem, with time and text."""
    return [
        (line.time, f"{line.machine}: {line.text}", "")
        for line in lines
        if line.level == "error"
        and not line.is_notice
        and line.time is not None
        and problem - _BEFORE <= line.time <= problem
    ]
