"""Launch: steps and machines as a grid, and under it what failed where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual.content import Content

from app.console import command_line
from app.report import what_next
from app.screens.step_screen import StepScreen, cause_lines, failure, progress, shown_state, shown_status
from app.shell.base_app import MusterApp
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.text import literal, muted
from app.wizard import actions
from app.wizard.records import LaunchRow, Status
from app.wizard.state import Step, WizardState
from training.run_files import is_live
from training.runs import summarise

_PROGRESS = 4
STATE_CELLS = max(len(status.value) for status in Status) + 2
"""Cells of a state: with fewer for some, the columns would move whenever a state changes."""


class LaunchScreen(StepScreen):
    """Starting the run."""

    STEP = Step.LAUNCH
    DETAIL_BELOW = True
    HELP = (
        "Every machine goes through the same steps. After the first training step the run is shown live; it "
        "continues in the background when this screen is closed. If a step fails, its log is shown: fix the cause "
        "and press 'r', or press 'x' to leave the machine out and plan again with the others."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("enter", "go_on", "Watch", "Show the run live.", main=True),
        Key("r", "retry", "Retry", "Try to start again."),
        Key("x", "drop", "Drop", "Leave the selected machine out and plan again with the others."),
    )

    def columns(self, state: WizardState) -> Sequence[Column]:
        steps = [Column(f"step{place}", step, most=14, least=5) for place, step in enumerate(state.launch.found.steps)]
        return (
            Column("name", "machine", most=26, least=14),
            *steps,
            Column("state", "state", most=40, least=16, rank=1),
        )

    def rows(self, state: WizardState) -> Sequence[Row]:
        return [_row(self.steered, row, len(state.launch.found.steps)) for row in state.launch.found.rows]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        failing = [row for row in state.launch.found.rows if row.status is Status.FAILED]
        row = next((row for row in failing if row.key == key), failing[0] if failing else None)
        if row is not None:
            head = [literal(row.name, "bold"), *cause_lines(row)]
            return [*head, *[literal(line, "$text-muted") for line in row.log]]
        run = Path(state.launch.found.run)
        if state.started and run.is_dir() and not is_live(run):
            return [muted(line) for line in what_next(summarise(run))]
        return [muted(line) for line in state.launch.progress[-_PROGRESS:]]

    def head(self, state: WizardState) -> Content:
        return failure(state.launch)

    def empty(self, state: WizardState) -> Content:
        return progress(state.launch, "The run is being started.")

    def hint(self, state: WizardState) -> Content:
        if state.launch.status is Status.FAILED:
            return muted("r tries again, x leaves the selected machine out, esc goes back to the plan.")
        run = Path(state.launch.found.run)
        if state.started and run.is_dir() and not is_live(run):
            return muted(f"The run has ended: {summarise(run).status}. Enter shows it, esc goes home.")
        return muted("The run continues in the background when this screen is closed.")

    def offered_keys(self) -> tuple[Key, ...]:
        watch, retry, drop = self.KEYS
        if self.state.launch.status is Status.FAILED:
            return (replace(retry, main=True), drop)
        return (watch, drop) if self.state.launch.found.run else (replace(watch, label="Watch when it runs"),)

    def leave_question(self) -> str:
        working = self.state.launch.status is Status.WORKING
        return "The run is being started and continues without this screen. Leave?" if working else ""

    def action_go_on(self) -> None:
        run = self.state.launch.found.run
        if self.state.launch.status is Status.FAILED:
            self.action_retry()
        elif run:
            self.steered.open_dashboard(Path(run))

    def action_drop(self) -> None:
        self.do(actions.drop(self.table.cursor))

    def headless(self) -> str:
        run = Path(self.state.launch.found.run).name
        return command_line("attach", run) if run else (self.state.plan.found.command or command_line("runs", "list"))


def _row(app: MusterApp, row: LaunchRow, steps: int) -> Row:
    cells = [shown_status(app, status, "") for status in row.cells][:steps]
    cells += [Content("")] * (steps - len(cells))
    state = shown_state(app, row)
    return Row(row.key, (literal(row.name), *cells, state.pad_right(max(0, STATE_CELLS - state.cell_length))))
