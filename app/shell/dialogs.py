"""What opens over a screen: help, the headless command, a question, the log of commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from app.shell.frame import WIDE, TooSmall, fit, muster
from app.shell.key_bar import key_line
from app.shell.keys import BESIDES, EVERYWHERE, Key
from app.shell.text import literal
from distributed.ssh.host_keys import COMPARED

if TYPE_CHECKING:
    from app.shell.base_app import CommandRecord


T = TypeVar("T")
_NAME_CELLS = 8
_KEY_LINE = 60
"""Cells for the keys of a dialog."""


class Box(ModalScreen[T]):
    """A box in the middle of a screen: a heading, what a subclass puts under it, and its keys."""

    DEFAULT_CSS = """
    Box { align: center middle; layers: base above; background: $background 60%; }
    Box > #box {
        width: 72; max-width: 94%; height: auto; max-height: 90%; padding: 1 2; background: $surface;
        border: round $border;
    }
    Box #heading { text-style: bold; height: auto; }
    Box #keys { height: 1; margin-top: 1; }
    """
    CLOSE = Key("escape", "close", "Close")

    def __init__(self, heading: str) -> None:
        super().__init__()
        self._heading = heading

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static(literal(self._heading), id="heading", markup=False)
            yield from self.body()
            yield Static(key_line(self.keys(), _KEY_LINE, ()), id="keys", markup=False)
        yield TooSmall()

    def on_mount(self) -> None:
        fit(self, self.app.size)

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Close this box, once: a second key that was on its way to it must not close what is under it."""
        return super().dismiss(result) if self.app.screen is self else AwaitComplete()

    def body(self) -> ComposeResult:
        """Yield the widgets between heading and keys."""
        yield from ()

    def keys(self) -> tuple[Key, ...]:
        """Return what may be pressed."""
        return (self.CLOSE,)


class Dialog(Box[bool]):
    """A box with text; ``esc`` closes it."""

    DEFAULT_CSS = """
    Dialog.-wide > #box { width: 92; }
    Dialog #heading { padding-bottom: 1; }
    Dialog #content { height: auto; max-height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", show=False),
    ]

    def body(self) -> ComposeResult:
        with VerticalScroll(id="content"):
            yield Static(self.content(), markup=False)

    def content(self) -> Content:
        """Return what the box holds."""
        return Content("")

    def action_close(self) -> None:
        self.dismiss(False)


class HelpDialog(Dialog):
    """What a screen is for, and its keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "close", show=False)]

    def __init__(self, heading: str, text: str, keys: Sequence[Key]) -> None:
        super().__init__(heading)
        self._text, self._keys = text, keys

    def content(self) -> Content:
        own = [line for key in self._keys for line in self._lines(key)]
        everywhere = [line for key in (EVERYWHERE[0], *BESIDES, EVERYWHERE[2]) for line in self._lines(key)]
        parts = [literal(line) for line in self._text.splitlines()] + [Content("")] * bool(self._text)
        heading = [Content(""), Content.styled("On every screen", "$text-muted")] if own else []
        return Content("\n").join([*parts, *own, *heading, *everywhere])

    def _lines(self, key: Key) -> list[Content]:
        """The name of a key, and beside it what it does."""
        room = (76 if self.app.size.width >= WIDE else 56) - _NAME_CELLS
        about = Content(key.help or key.label).wrap(room)
        names = (key.name, *[""] * (len(about) - 1))
        return [
            Content.assemble((f"{name:>{_NAME_CELLS - 2}}", "bold $text-primary"), "  ", part)
            for name, part in zip(names, about, strict=True)
        ]


class CommandDialog(Dialog):
    """A command to type instead."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y,enter", "copy", show=False), Binding("e", "close", show=False)]

    def __init__(self, command: str) -> None:
        super().__init__("The same without this screen")
        self._command = command

    def content(self) -> Content:
        return literal(self._command, "bold")

    def keys(self) -> tuple[Key, ...]:
        return (Key("y", "copy", "Copy", main=True), self.CLOSE)

    def action_copy(self) -> None:
        muster(self).copy(self._command)
        self.dismiss(True)


class QuestionDialog(Dialog):
    """A question with two answers; the result is whether it was the first one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,y", "agree", show=False), Binding("n", "close", show=False)]

    def __init__(self, question: str, yes: str, no: str, about: Sequence[Content] = ()) -> None:
        super().__init__(question)
        self._yes, self._no, self._about = yes, no, about

    def content(self) -> Content:
        return Content("\n").join(self._about)

    def keys(self) -> tuple[Key, ...]:
        return (Key("enter", "agree", self._yes, main=True), Key("escape", "close", self._no))

    def action_agree(self) -> None:
        self.dismiss(True)


class TrustDialog(Dialog):
    """Whether a host key is that of the machine that is meant; enter, as every other answer but one key, says no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "accept", show=False),
        Binding("enter,n", "close", show=False),
    ]

    def __init__(self, machine: str, fingerprint: str, compare: str) -> None:
        super().__init__(f"Is this {machine}?")
        self._fingerprint, self._compare = fingerprint, compare

    def content(self) -> Content:
        start, end = self._fingerprint[:-COMPARED], self._fingerprint[-COMPARED:]
        return Content("\n").join([
            literal("It was never met before. This is the fingerprint of its host key:", "$text-muted"),
            Content.assemble(literal(start), literal(end, "bold reverse")),
            literal("The machine itself prints the same one. Type there:", "$text-muted"),
            literal(self._compare, "bold"),
            Content(""),
            Content.assemble("Accept it only if that one also ends in ", literal(end, "bold"), "."),
        ])  # fmt: skip

    def keys(self) -> tuple[Key, ...]:
        return (Key("a", "accept", "It is the same"), Key("escape", "close", "Not now", main=True))

    def action_accept(self) -> None:
        self.dismiss(True)


class CommandLogDialog(Dialog):
    """Every command that was run on any machine, and what else was done there."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("g", "close", show=False)]

    def __init__(self, records: Sequence[CommandRecord]) -> None:
        super().__init__("What was done on which machine")
        self._records = records

    def content(self) -> Content:
        if not self._records:
            return literal("Nothing yet. What is run on a machine, this one included, is listed here.", "$text-muted")
        return Content("\n").join([_record(record) for record in self._records])


def _record(record: CommandRecord) -> Content:
    if not record.machine:
        return literal(record.command)
    at = "" if record.at is None else time.strftime("%H:%M:%S  ", time.localtime(record.at))
    outcome = record.outcome or "runs"
    seconds = "" if record.seconds is None else f" in {record.seconds:.1f} s"
    style = "$text-success" if outcome == "ok" else ("$text-muted" if outcome == "runs" else "$text-error")
    head = Content.assemble(
        (at, "$text-muted"), literal(record.machine, "bold"), "  ", literal(f"{outcome}{seconds}", style)
    )
    return Content("\n").join([head, Content.assemble("  ", literal(record.command))])
