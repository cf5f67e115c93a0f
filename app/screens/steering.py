"""What a screen knows of the guided set-up: a state to draw, and somewhere to send actions."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from textual.content import Content

from app.shell.base_app import MusterApp
from app.shell.text import Mark, literal
from app.wizard.records import Assessment, Status
from app.wizard.state import WizardState
from app.wizard.transitions import Action

_MARKS = {
    Status.WAITING: Mark.WAITING,
    Status.WORKING: Mark.WORKING,
    Status.OK: Mark.OK,
    Status.WARNING: Mark.WARNING,
    Status.FAILED: Mark.PROBLEM,
    Status.SKIPPED: Mark.SKIPPED,
    Status.STOPPED: Mark.STOPPED,
}


class Steering(Protocol):
    """The set-up as its screens see it; ``app.wizard.engine.Wizard`` is one."""

    @property
    def state(self) -> WizardState: ...

    def do(self, action: Action) -> object: ...


class SteeredApp(MusterApp):
    """The application as its screens see it; :class:`app.screens.app.WizardApp` is one."""

    wizard: Steering

    def follow(self) -> None:
        """Show the state of the moment, on the screen of its step."""
        raise NotImplementedError  # the application has it

    def open_dashboard(self, run: Path) -> None:
        """Show a run live over the set-up; esc comes back."""
        raise NotImplementedError  # the application has it


def mark(status: Status) -> Mark:
    """Return how a status is drawn."""
    return _MARKS[status]


def shown_status(app: MusterApp, status: Status, word: str | None = None) -> Content:
    """Return symbol and word of a status; what is worked on turns."""
    look = _MARKS[status]
    symbol = app.spinner() if status is Status.WORKING else app.symbol(look)
    text = status.value if word is None else word
    return literal(f"{symbol} {text}".rstrip(), look.style)


def shown_state(app: MusterApp, row: Assessment) -> Content:
    """Return a state in its own words."""
    return shown_status(app, row.status, row.label)


def cause_lines(row: Assessment) -> list[Content]:
    """Return what is wrong and what to do about it."""
    style = "$text-warning" if row.status is Status.WARNING else "$text-error"
    lines = [literal(row.cause, style)] if row.cause else []
    return [*lines, *([Content.assemble(("do: ", "$text-muted"), literal(row.fix))] if row.fix else [])]
