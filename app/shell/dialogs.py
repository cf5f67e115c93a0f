"""Modal dialogs: help, the headless command, a question, the command log, text input, a choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from app.console import purpose_of, visible
from app.shell.folding import Prose, wrapped
from app.shell.keys import BESIDES, EVERYWHERE, WIDE, Key, TooSmall, fit, key_line
from app.shell.row_table import RowTable
from app.shell.terminal_app import app_of
from app.shell.text import TableColumn, TableRow, join, literal, muted
from distributed.ssh.command_log import CommandRecord
from profiles.errors import BadInput
from profiles.quantities import clock_text

T = TypeVar("T")
BEHIND = "-behind"
"""CSS class of the screen under a dialog if the terminal cannot mix colours to darken it."""
_NAME_CELLS = 8
_KEY_LINE = 60
"""Cells for the keys of a dialog."""


class Box(ModalScreen[T]):
    """A centred modal box: a heading, the subclass's body, and its keys."""

    DEFAULT_CSS = """
    Box { align: center middle; layers: base above; background: $background 60%; }
    Box > #box {
        width: 72; max-width: 94%; height: auto; max-height: 90%; padding: 1 2; background: $surface;
        border: round $border;
    }
    Box #heading { text-style: bold; height: auto; }
    Box #keys { height: 1; margin-top: 1; }
    Box ToastRack { dock: top; align: right top; }  /* at the bottom a notice would cover the keys */
    """
    CLOSE = Key("escape", "close", "Close")
    HOLDS_CTRL_C: ClassVar[bool] = False
    """Whether ctrl+c closes only this box rather than the application."""
    MUST_BE_READ: ClassVar[bool] = False
    """Whether keys are ignored that were pressed before anybody can have read it."""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", show=False)]

    def __init__(self, heading: str) -> None:
        super().__init__()
        self._heading = heading
        self._under: Screen[Any] = self

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static(literal(self._heading), id="heading", markup=False)
            yield from self.body()
            yield Static(key_line(self.keys(), _KEY_LINE, ()), id="keys", markup=False)
        yield TooSmall()

    def on_mount(self) -> None:
        fit(self, self.app.size)
        app = app_of(self)
        self._under = app.screen_stack[-2]
        self._under.set_class(app.no_color or app.theme.startswith("ansi"), BEHIND)

    def on_unmount(self) -> None:
        self._under.remove_class(BEHIND)

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Close this box, once: a second key press must not close the screen under it."""
        return super().dismiss(result) if self.app.screen is self else AwaitComplete()

    def body(self) -> ComposeResult:
        """Yield the widgets between heading and keys."""
        yield from ()

    def keys(self) -> tuple[Key, ...]:
        """Return the keys of the box."""
        return (self.CLOSE,)

    def action_close(self) -> None:
        self.dismiss()


class Dialog(Box[bool]):
    """A box with text; ``esc`` closes it."""

    DEFAULT_CSS = """
    Dialog.-wide > #box { width: 92; }
    Dialog #heading { padding-bottom: 1; }
    Dialog #content { height: auto; max-height: 55vh; }  /* what heading and keys leave of the box at 24 rows */
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "close", show=False)]

    def __init__(self, heading: str, *lines: Content) -> None:
        super().__init__(heading)
        self._lines = lines

    def body(self) -> ComposeResult:
        with VerticalScroll(id="content"):
            yield Static(self.content(), markup=False)

    def content(self) -> Content:
        """Return the text of the box."""
        return Content("\n").join(self._lines)


class HelpDialog(Dialog):
    """Purpose and keys of a screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "close", show=False)]

    def __init__(self, heading: str, text: str, keys: Sequence[Key]) -> None:
        super().__init__(heading)
        self._text, self._keys = text, keys

    def content(self) -> Content:
        screen_lines = [line for key in self._keys for line in self._about(key)]
        everywhere = [line for key in (EVERYWHERE[0], *BESIDES, EVERYWHERE[2]) for line in self._about(key)]
        text_lines = [literal(line) for line in self._text.splitlines()] + [Content("")] * bool(self._text)
        heading = [Content(""), Content.styled("On every screen", "$text-muted")] if screen_lines else []
        return Content("\n").join([*text_lines, *screen_lines, *heading, *everywhere])

    def _about(self, key: Key) -> list[Content]:
        """Return the name of a key and, next to it, its help."""
        width = (76 if self.app.size.width >= WIDE else 56) - _NAME_CELLS
        key = key.chosen(app_of(self).keymap)
        about = wrapped(Content(key.help or key.label), width)
        names = (key.name, *[""] * (len(about) - 1))
        return [
            Content.assemble((f"{name:>{_NAME_CELLS - 2}}", "bold $text-primary"), "  ", line)
            for name, line in zip(names, about, strict=True)
        ]


class CommandDialog(Dialog):
    """The equivalent command, with an explanation."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y,enter", "copy", show=False), Binding("e", "close", show=False)]

    def __init__(self, command: str, about: str = "") -> None:
        explanation = (Content(""), literal(about, "$text-muted")) if about else ()
        lines = [literal(line, "bold") for line in command.splitlines()]
        super().__init__("The same without this screen", *lines, *explanation)
        self._command = command

    def keys(self) -> tuple[Key, ...]:
        return (Key("y", "copy", "Copy", main=True), self.CLOSE)

    def action_copy(self) -> None:
        app_of(self).copy(self._command)
        self.dismiss(True)


class CommandsDialog(Box[None]):
    """A list of commands: enter copies the one under the cursor.

    Args:
        actions: labels, by name, of rows above the commands; a subclass performs them.
    """

    DEFAULT_CSS = """
    CommandsDialog > #box { width: 96; }
    CommandsDialog #commands { margin-top: 1; max-height: 12; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,n", "close", show=False), Binding("y", "copy", show=False)]

    def __init__(
        self, heading: str, commands: Sequence[str], actions: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(heading)
        self._commands, self._actions = commands, actions

    def body(self) -> ComposeResult:
        yield RowTable((TableColumn("command", "command", max_width=200, folds=True),), headed=False, id="commands")

    def on_mount(self) -> None:
        table = self.query_one(RowTable)
        rows = [(key, literal(words)) for key, words in self._actions.items()]
        rows += [(command, join(literal(command), muted(purpose_of(command)))) for command in self._commands]
        table.show([TableRow(key, (words,)) for key, words in rows])
        table.focus()

    def keys(self) -> tuple[Key, ...]:
        return (Key("enter", "copy", "Copy", main=True), self.CLOSE)

    def on_row_table_chosen(self, event: RowTable.Chosen) -> None:
        event.stop()
        self.action_copy()

    def action_copy(self) -> None:
        app_of(self).copy(self.selected)

    @property
    def selected(self) -> str:
        """The command, or the name of the action, under the cursor."""
        return self.query_one(RowTable).cursor


class QuestionDialog(Dialog):
    """A question with two answers; the result is whether the first one was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,y", "agree", show=False), Binding("n", "close", show=False)]

    def __init__(self, question: str, yes: str, no: str) -> None:
        super().__init__(question)
        self._yes, self._no = yes, no

    def keys(self) -> tuple[Key, ...]:
        return (Key("enter", "agree", self._yes, main=True), Key("escape", "close", self._no))

    def action_agree(self) -> None:
        self.dismiss(True)


class CommandLogDialog(Dialog):
    """Every command that was run on any machine, and other actions there, newest first."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("g", "close", show=False)]

    def __init__(self, records: Sequence[CommandRecord]) -> None:
        nothing = literal(
            "Nothing yet. Every command run from here on a machine, this one included, is listed.", "$text-muted"
        )
        ordered = sorted(records, key=lambda record: record.at)[::-1]
        super().__init__("Commands by machine, newest first", *(map(_record, ordered) if records else (nothing,)))


def _record(record: CommandRecord) -> Content:
    if not record.machine:
        return literal(record.command)
    at = f"{clock_text(record.at)}  " if record.at else ""
    outcome = record.outcome or "runs"
    style = "$text-success" if outcome == "ok" else ("$text-muted" if outcome == "runs" else "$text-error")
    head = Content.assemble((at, "$text-muted"), literal(record.machine, "bold"), "  ", literal(outcome, style))
    lines = [head, *(Content.assemble("  ", literal(line)) for line in (record.command, record.typed) if line)]
    return Content("\n").join(lines)


class TextDialog(Box[str | None]):
    """Asks for a line of text; ``None`` if it was closed.

    Args:
        heading: the question.
        about: lines under it.
        value: initial value.
        accept: label of enter.
        secret: shown as dots, and cleared from the field as soon as it is submitted.
        choices: values to choose from, with a description of each.
        needed: warning shown if nothing was typed; if there are choices, the marked one is taken instead.
        problem_of: returns in one line what is wrong with a value; empty: nothing.
    """

    DEFAULT_CSS = """
    TextDialog #about { height: auto; max-height: 8; color: $text-muted; }
    TextDialog #field { margin-top: 1; height: 1; border: none; padding: 0 1; background: $panel; }
    TextDialog #choices { margin-top: 1; max-height: 8; background: $surface; }
    """
    FREE: ClassVar[bool] = True
    """Whether any text may be typed, not only one of the choices."""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("down", "choices", show=False)]

    def __init__(
        self,
        heading: str,
        about: Sequence[Content] = (),
        *,
        value: str = "",
        accept: str = "Use it",
        secret: bool = False,
        choices: Sequence[tuple[str, str]] = (),
        needed: str = "",
        problem_of: Callable[[str], str] = lambda value: "",
    ) -> None:
        super().__init__(heading)
        self._about, self._value, self._problem_of = about, visible(value), problem_of
        self._accept, self._secret, self._choices, self._needed = accept, secret, choices, needed

    def body(self) -> ComposeResult:
        yield Prose(Content("\n").join(self._about), id="about")
        yield Input(self._value, password=self._secret, id="field")
        if self._choices:
            columns = (TableColumn("value", "value", max_width=30), TableColumn("about", "about", max_width=60))
            yield RowTable(columns, headed=False, id="choices")

    def keys(self) -> tuple[Key, ...]:
        list_keys = [Key("down", "choices", "To the list")] if self._choices and self.FREE else []
        return (Key("enter", "accept", self._accept, main=True), self.CLOSE, *list_keys)

    def on_mount(self) -> None:
        field = self.query_one("#field", Input)
        field.cursor_blink = False
        self.begin()
        for table in self.query(RowTable):
            table.show(
                [TableRow(value, (literal(value), literal(about, "$text-muted"))) for value, about in self._choices]
            )
            if self._value in [value for value, _ in self._choices]:
                table.select(self._value)

    def begin(self) -> None:
        """Focus the input."""
        self.query_one("#field", Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._submit(event.value)

    def on_row_table_chosen(self, event: RowTable.Chosen) -> None:
        event.stop()
        self._submit(event.row)

    def _submit(self, value: str) -> None:
        if self._needed and not value.strip():
            value = next((table.cursor for table in self.query(RowTable)), "")
        problem = self._needed if self._needed and not value else self._problem_of(value)
        if problem:
            lines = (*self._about, literal(problem, "$text-warning"))
            self.query_one("#about", Static).update(Content("\n").join(lines))
            return
        field = self.query_one("#field", Input)
        if self._secret:
            with field.prevent(Input.Changed):
                field.value = ""
        self.dismiss(value)

    def action_accept(self) -> None:
        self._submit(self.query_one("#field", Input).value)

    def action_choices(self) -> None:
        for table in self.query(RowTable):
            table.focus()


def refusal_by(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return the function that tells why ``parse`` refuses a text; its answer is empty where it does not."""

    def refusal(text: str) -> str:
        try:
            parse(text)
        except BadInput as error:
            return str(error)
        return ""

    return refusal


class ChoiceDialog(TextDialog):
    """Asks for one of several values."""

    FREE = False
    DEFAULT_CSS = """
    ChoiceDialog #field { display: none; }
    ChoiceDialog #choices { max-height: 14; }
    """

    def begin(self) -> None:
        self.query_one(RowTable).focus()

    def action_accept(self) -> None:
        self._submit(self.query_one(RowTable).cursor)
