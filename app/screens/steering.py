"""What a screen knows of the guided set-up: a state to draw, and somewhere to send actions."""

from __future__ import annotations

from typing import Protocol

from textual.content import Content

from app.shell.base_app import MusterApp
from app.shell.symbols import Mark
from app.shell.text import literal
from app.wizard.actions import Action
from app.wizard.state import Status, WizardState

_MARKS = {
    Status.WAITING: Mark.WAITING,
    Status.WORKING: Mark.WORKING,
    Status.OK: Mark.OK,
    Status.WARNING: Mark.WARNING,
    Status.FAILED: Mark.PROBLEM,
    Status.SKIPPED: Mark.SKIPPED,
    Status.STOPPED: Mark.STOPPED,
}


class Shown(Protocol):
    """Whatever has a state that is drawn: :class:`app.wizard.assessment.Assessment` is one."""

    @property
    def status(self) -> Status: ...

    @property
    def label(self) -> str: ...

    @property
    def cause(self) -> str: ...

    @property
    def fix(self) -> str: ...


class Steering(Protocol):
    """The set-up as its screens see it; ``app.wizard.engine.Wizard`` is one."""

    @property
    def state(self) -> WizardState: ...

    def do(self, action: Action) -> object: ...


def mark(status: Status) -> Mark:
    """Return how a status is drawn."""
    return _MARKS[status]


def shown_status(app: MusterApp, status: Status, word: str | None = None) -> Content:
    """Return symbol and word of a status; what is worked on turns."""
    look = _MARKS[status]
    symbol = app.spinner() if status is Status.WORKING else app.symbol(look)
    text = status.value if word is None else word
    return literal(f"{symbol} {text}".rstrip(), look.style)


def shown_state(app: MusterApp, row: Shown) -> Content:
    """Return a state in its own words."""
    return shown_status(app, row.status, row.label)


def cause_lines(row: Shown) -> list[Content]:
    """Return what is wrong and what to do about it."""
    style = "$text-warning" if row.status is Status.WARNING else "$text-error"
    lines = [literal(row.cause, style)] if row.cause else []
    return [*lines, *([Content.assemble(("do: ", "$text-muted"), literal(row.fix))] if row.fix else [])]
