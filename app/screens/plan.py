"""Plan and Launch: the changes on each machine and their cost; the start, as a grid of steps and machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.content import Content

from app.console import command_line
from app.report import what_next
from app.screens.step_screen import SKIP, StepScreen, cause_lines, failure, progress, shown_state, shown_status
from app.shell.base_app import MusterApp
from app.shell.dialogs import TextDialog
from app.shell.folding import wrapped
from app.shell.keys import Key
from app.shell.text import StatusMark, TableColumn, TableRow, literal, muted
from app.wizard.state import actions
from app.wizard.state.dependencies import is_unsaved
from app.wizard.state.launch_records import LaunchRow
from app.wizard.state.records import UNSETTLED, ItemStatus, MachineChange, MachineRow, PlanPreview
from app.wizard.state.state import Action, StatePart, Step, WizardState
from distributed.ssh.errors import Unequipped
from profiles.quantities import bytes_text
from training.records.plan import status_word
from training.records.run_files import is_live
from training.records.runs import summarise

_INSTALL = "c goes to the checks, where f installs what is missing, into Muster's own folder there"
_PROGRESS = 4
STATE_CELLS = max(len(status.value) for status in ItemStatus) + 2
"""Fixed width of a state, so that columns do not move when a state changes."""
_SHOW = Key("enter", "go_on", "Show", "Show the run that was started.", main=True)
_RETRY = Key("r", "retry", "Retry", "Make the plan again.", main=True)
_SIGNS = {"+": "$text-success", "~": "$text-warning", "-": "$text-error"}
_LABEL = 11
_SAVE_FIRST = "works once saved: enter saves and starts, w only saves"


class PlanScreen(StepScreen):
    """Review and start."""

    STEP = Step.PLAN
    COLUMNS = (
        TableColumn("machine", "machine", max_width=26, min_width=14),
        TableColumn("what", "change", max_width=90, min_width=20, folds=True),
        TableColumn("bytes", "size", right=True, max_width=9, min_width=6),
    )
    DETAIL_BELOW = True
    HELP = (
        "Nothing is trained or saved so far; other machines have what you asked for at Access and Checks, and code "
        "and data to measure with. '+' is added, '~' changes, '-' is removed. Enter saves the profile and starts; "
        "'w' only writes the files, so that the command works. 'machines clean' removes everything of Muster from "
        "the machines again."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("enter", "go_on", "Start", "Save the profile and start the run.", main=True),
        Key("e", "headless", "Command", "The command that does the same, to copy."),
        Key("w", "write", "Save", "Only write the files, so that the command works; starts nothing."),
        Key("a", "name", "Name", "Another name for the saved profile."),
        Key("m", "measure", "Measure", "Run the task briefly on this machine, and predict the time of the run."),
        Key("b", "job", "Job", "Back to the job, to change options.", shown=False),
        Key("n", "another", "Another", "Start another run, if one was started from this plan."),
        SKIP,
        Key("o", "without", "Without", "Go on without the machines that are not online."),
        Key("c", "checks", "Checks", "Back to the checks, which install what is missing."),
    )

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        changes = state.plan.value.changes
        previous_machines = ("", *(change.machine for change in changes))
        return [_change_row(change, change.machine != other) for change, other in zip(changes, previous_machines)]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        if state.plan.status in UNSETTLED:
            return ()
        width = self.query_one("#about").size.width or self.app.size.width // 2
        return facts(state.plan.value, width, is_unsaved(state))

    def head(self, state: WizardState) -> Content:
        if failed := _failed(state):
            return failure(replace(failed, fix=_INSTALL) if _lacks_packages(state) else failed)
        plan = state.plan.value
        left_out = [literal(plan.left_out, "$text-warning")] if plan.left_out else []
        return Content("\n").join([literal(plan.way, "$text-success"), *left_out, *self.map_lines(state)])

    def empty(self, state: WizardState) -> Content:
        if _has_failed(state):
            return Content("")
        doing = progress(state.strategy, "The plan is being made.")
        names = " and ".join(row.name for row in _absent(state))
        offline = (
            [literal(f"{names}: not online. {_without_text(state)}esc goes back.", "$text-warning")] if names else []
        )
        return Content("\n").join([doing, *offline])

    def summary(self, state: WizardState) -> str:
        return f"profile {state.answers.profile}"

    def hint(self, state: WizardState) -> Content:
        if _has_failed(state):
            checks = "c goes to the checks, " if _lacks_packages(state) else ""
            return muted(f"{checks}{_without_text(state)}r tries again, b goes to the job, esc goes back.")
        if state.started:
            run = summarise(Path(state.launch.value.run)).run_id
            return literal(f"Started: {run}. Enter shows it, n starts another one.", "$text-success")
        if state.saved:
            return literal("Saved: the command works now.", "$text-success")
        if state.plan.status in UNSETTLED:
            return Content("")
        return muted("Enter starts. Nothing is trained or saved before that.")

    def offered_keys(self) -> tuple[Key, ...]:
        start, command, save, name, measure, job, another, skip, without, checks = self.KEYS
        common = (command, save, name, *((measure,) if len(self.state.members) == 1 else ()), job)
        if self.state.started:
            return (_SHOW, another, *common)
        go_without = (without,) if _absent(self.state) else ()
        if _has_failed(self.state):
            return (_RETRY, *([checks] if _lacks_packages(self.state) else []), *go_without, *common)
        if self.state.plan.status in UNSETTLED:
            is_measuring = self.state.strategy.status is ItemStatus.WORKING and len(self.state.members) > 1
            skips = (skip,) if is_measuring and not go_without else ()
            return (*go_without, *skips, command, save, name, job)  # enter would only say that it is made
        return (start, *common)

    def action_go_on(self) -> None:
        if self.state.started:
            self.do(actions.confirm())  # it leads to the run
        else:
            self._confirmed(actions.confirm)

    def action_another(self) -> None:
        if self.state.started:
            self._confirmed(partial(actions.confirm, another=True))

    def action_write(self) -> None:
        self._confirmed(actions.save_only)

    def _confirmed(self, action: Callable[..., Action]) -> None:
        """Do an action, after the user has explicitly accepted unencrypted training traffic, if there is any."""
        if not self.state.plan.value.in_clear:
            self.do(action())
            return

        def answered(consent: str | None) -> None:
            if consent is not None:
                self.do(action(consent))

        about = [literal(text, "$text-warning") for text in self.state.plan.value.in_clear]
        about.append(muted(f"Type '{actions.IN_CLEAR}' to accept that; 'engine = mesh' at the Job encrypts it."))
        self.app.push_screen(TextDialog("This training is not encrypted", about, accept="Agree"), answered)

    def action_measure(self) -> None:
        if len(self.state.members) == 1:  # several are measured at Strategy
            self.do(actions.measure())

    def action_without(self) -> None:
        for row in _absent(self.state):
            self.do(actions.skip(row.key))

    def action_checks(self) -> None:
        self.do(actions.go_to(Step.CHECKS))

    def action_job(self) -> None:
        self.do(actions.go_to(Step.JOB))

    def action_name(self) -> None:
        def answered(name: str | None) -> None:
            if name:
                self.do(actions.save_as(name))

        about = [muted("Your choices are saved in profiles/saved; Home lists them next time.")]
        value = self.state.answers.save_as or self.state.plan.value.profile
        self.app.push_screen(TextDialog("Name of the saved profile", about, value=value, accept="Use it"), answered)

    def copied(self) -> str:
        return self.headless()

    def about_headless(self) -> str:
        first = f"It {_SAVE_FIRST}. " if is_unsaved(self.state) else ""
        trying = "--plan-only shows the plan and starts nothing; --try really runs a few steps and saves nothing."
        return first + trying

    def headless(self) -> str:
        return self.state.plan.value.command or command_line("distributed-train", self.state.answers.profile)


def _failed(state: WizardState) -> StatePart[Any] | None:
    return next((part for part in (state.plan, state.strategy) if part.status is ItemStatus.FAILED), None)


def _has_failed(state: WizardState) -> bool:
    return _failed(state) is not None


def _lacks_packages(state: WizardState) -> bool:
    failed = _failed(state)
    return failed is not None and failed.failure == Unequipped.cause


def _absent(state: WizardState) -> list[MachineRow]:
    """Return the machines that the plan can do without, if there are others: while it is made, those that were asked
    and did not answer; once it has failed, all that are not online."""
    if not _has_failed(state) and state.plan.status not in UNSETTLED:
        return []
    present = {ItemStatus.OK, *(() if _has_failed(state) else UNSETTLED)}
    absent = [row for row in state.members if not row.here and row.status not in present]
    return absent if len(absent) < len(state.members) else []


def _without_text(state: WizardState) -> str:
    names = " and ".join(row.name for row in _absent(state))
    return f"o goes on without {names}, " if names else ""


def _change_row(change: MachineChange, shows_machine: bool) -> TableRow:
    description = Content.assemble((f"{change.sign} ", _SIGNS.get(change.sign, "")), literal(change.what))
    size = muted(bytes_text(change.bytes) if change.bytes else "")
    return TableRow(change.key, (literal(change.machine if shows_machine else ""), description, size))


def facts(plan: PlanPreview, width: int, unsaved: bool) -> list[Content]:
    """Return the facts to know about a plan before it starts, in lines of ``width`` cells.

    Args:
        unsaved: whether its command does not work yet.
    """
    rows = [
        ("copies", plan.copying, ""),
        ("time", _time(plan), ""),
        *[("encrypted", f"{StatusMark.OK.symbol} {text}", StatusMark.OK.style) for text in plan.encrypted],
        *[("plaintext", f"{StatusMark.WARNING.symbol} {text}", StatusMark.WARNING.style) for text in plan.in_clear],
        ("data", plan.about_data, ""),
        ("saved as", plan.profile, ""),
        ("command", plan.command, "bold"),
        ("command", _SAVE_FIRST if unsaved else "", "$text-warning"),
        ("network", "; ".join(plan.network), ""),
    ]
    lines, previous_label = [], ""
    for label, text, style in rows:
        if text:
            lines += _fact("" if label == previous_label else label, literal(text, style), width)
            previous_label = label
    return lines


def _time(plan: PlanPreview) -> str:
    if plan.time:
        return " ".join(plan.time)
    return "not measured; m measures it" if plan.command else ""


def _fact(label: str, text: Content, width: int) -> list[Content]:
    folded = wrapped(text, max(_LABEL, width - _LABEL))
    labels = (label, *[""] * (len(folded) - 1))
    return [Content.assemble((f"{name:<{_LABEL}}", "$text-muted"), line) for name, line in zip(labels, folded)]


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

    def columns(self, state: WizardState) -> Sequence[TableColumn]:
        steps = [
            TableColumn(f"step{i}", step, max_width=14, min_width=5) for i, step in enumerate(state.launch.value.steps)
        ]
        return (
            TableColumn("name", "machine", max_width=26, min_width=14),
            *steps,
            TableColumn("state", "state", max_width=40, min_width=16, rank=1),
        )

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        return [_launch_row(self.steered, row, len(state.launch.value.steps)) for row in state.launch.value.rows]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        failing = [row for row in state.launch.value.rows if row.status is ItemStatus.FAILED]
        row = next((row for row in failing if row.key == key), failing[0] if failing else None)
        if row is not None:
            head = [literal(row.name, "bold"), *cause_lines(row)]
            return [*head, *[literal(line, "$text-muted") for line in row.log]]
        run = Path(state.launch.value.run)
        if state.started and run.is_dir() and not is_live(run):
            return [muted(line) for line in what_next(summarise(run))]
        phases = [literal(f"{row.name}: {row.phase}") for row in state.launch.value.rows if row.phase]
        return [*phases, *[muted(line) for line in state.launch.progress[-_PROGRESS:]]]

    def question(self, state: WizardState) -> str:
        run = Path(state.launch.value.run)
        if not state.started or not run.is_dir():
            return super().question(state)
        return "The run goes on" if is_live(run) else f"The run has ended: {status_word(summarise(run).status)}"

    def head(self, state: WizardState) -> Content:
        return failure(state.launch)

    def empty(self, state: WizardState) -> Content:
        return progress(state.launch, "The run is being started.")

    def hint(self, state: WizardState) -> Content:
        if state.launch.status is ItemStatus.FAILED:
            return muted("r tries again, x leaves the selected machine out, esc goes back to the plan.")
        run = Path(state.launch.value.run)
        if state.started and run.is_dir() and not is_live(run):
            return muted("Enter shows the run, esc goes home.")
        return muted("The run continues in the background when this screen is closed.")

    def offered_keys(self) -> tuple[Key, ...]:
        watch, retry, drop = self.KEYS
        if self.state.launch.status is ItemStatus.FAILED:
            return (replace(retry, main=True), drop)
        return (watch if self.state.launch.value.run else replace(watch, label="Show it when it runs"),)

    def leave_question(self) -> str:
        working = self.state.launch.status is ItemStatus.WORKING
        return "The run is being started and continues without this screen. Leave?" if working else ""

    def action_go_on(self) -> None:
        run = self.state.launch.value.run
        if self.state.launch.status is ItemStatus.FAILED:
            self.action_retry()
        elif run:
            self.steered.open_dashboard(Path(run))

    def action_drop(self) -> None:
        self.do(actions.drop(self.table.cursor))

    def headless(self) -> str:
        run = Path(self.state.launch.value.run).name
        return (
            command_line("runs", "attach", run)
            if run
            else (self.state.plan.value.command or command_line("runs", "list"))
        )


def _launch_row(app: MusterApp, row: LaunchRow, steps: int) -> TableRow:
    cells = [shown_status(app, status, "") for status in row.cells][:steps]
    cells += [Content("")] * (steps - len(cells))
    state = shown_state(app, row)
    return TableRow(row.key, (literal(row.name), *cells, state.pad_right(max(0, STATE_CELLS - state.cell_length))))
