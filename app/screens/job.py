"""Job: the model, the data and every option of the profile; the advanced ones are folded away."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.job_preview import run_preview, steps_of
from app.screens.step_screen import MARKS, StepScreen, cause_lines
from app.shell.dialogs import ChoiceDialog, TextDialog
from app.shell.keys import WIDE, Key
from app.shell.text import StatusMark, TableColumn, TableRow, join, literal, muted
from app.wizard.state import actions
from app.wizard.state.data_actions import leave_out
from app.wizard.state.dependencies import measures
from app.wizard.state.records import UNSETTLED, Assessment, DataSummary, Fit, ItemStatus, JobOption
from app.wizard.state.state import StatePart, Step, WizardState
from profiles.errors import counted
from profiles.installation import shown_path
from profiles.options import OptionSpec, check_value, unusual_value
from profiles.quantities import duration_text, memory_text

GO, PROFILE, MODEL, DATASET, ADVANCED = "go", "profile", "model", "dataset", "advanced"
_PLAIN = {
    "epochs": "passes over the training data",
    "batch_size": "samples at a time on one device",
    "learning_rate": "at its peak, for one machine alone",
    "language": "spoken, where no table says it",
    "tuning": "all weights, or small adapters",
    "max_train_samples": "use only the first N; 0: all",
    "augmentation": "noise and shifts added; 0: off",
}
"""Short descriptions of the main options, for 80 columns; their full help is shown under the row."""
_SHOWN_BROKEN = 3
_VALUE = 36
"""Width of the value column in cells."""
_NARROW_NAME, _NARROW_VALUE, _NARROW_PATH = 22, 15, 27
"""Widths of the columns of names and values in narrow terminals; where the data set or the model is a path, the values
take more."""


class JobScreen(StepScreen):
    """Which model, on which data?"""

    STEP = Step.JOB
    COLUMNS = (
        TableColumn("name", "option", max_width=30, min_width=16),
        TableColumn("value", "value", max_width=_VALUE, min_width=10),
        TableColumn("about", "about", max_width=80, min_width=12, folds=True),
    )
    HELP = (
        "Enter on the first line continues with these values; enter on an option changes it, and 'd' restores the "
        "profile's value. Changed values are marked. '/' finds any option, also the advanced ones."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("enter", "go_on", "Continue", "Continue, or change the selected option.", main=True),
        Key("n", "next", "Next", "Continue with these values."),
        Key("d", "reset", "Default", "Restore the profile's value."),
        Key("o", "advanced", "Advanced", "Show or hide the advanced options."),
        Key("l", "leave_out", "Leave out", "Make a data set of the recordings that can be read, and take it."),
    )

    _open = _chose_data = False
    _judged_data: object = ""
    """The answers whose data set was last read: the cursor moves once for them."""

    def columns(self, state: WizardState) -> Sequence[TableColumn]:
        """Where there is little width, names are folded and values cut, so that what they are about has its line."""
        if self.app.size.width >= WIDE:
            return self.COLUMNS
        name, value, about = self.COLUMNS
        paths = max(len(_shown(one)) for one in (state.job.value.dataset, state.job.value.model))
        width = min(max(_NARROW_VALUE, paths), _NARROW_PATH)
        return replace(name, max_width=_NARROW_NAME), replace(value, max_width=width), about

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        job, profile = state.job.value, state.answers.profile
        is_filtered = self.ready and bool(self.table.filter_text)
        main = [row for row in job.options if not row.advanced and row.name not in (MODEL, DATASET)]
        advanced = [row for row in job.options if row.advanced and row.name not in (MODEL, DATASET)]
        narrow = self.app.size.width < WIDE
        fold = "▾" if self._open else "▸"
        return [
            TableRow(
                GO, (Content.styled("Continue", "bold $text-primary"), muted(profile), muted("with these values"))
            ),
            TableRow(DATASET, (Content("data set"), literal(_shown(job.dataset), "bold"), self._data(state.data))),
            TableRow(MODEL, (Content("model"), literal(_shown(job.model), "bold"), self._fits(state))),
            TableRow(PROFILE, (Content("profile"), literal(profile, "bold"), muted("all values start from it"))),
            *[_option(row, narrow, self._steps(state) if row.name == "epochs" else "") for row in main],
            TableRow(ADVANCED, (muted(f"{fold} Advanced"), muted("rarely needed"), Content(""))),
            *([_option(row, narrow) for row in advanced] if self._open or is_filtered else []),
        ]

    def _steps(self, state: WizardState) -> str:
        steps, _ = steps_of(state)
        return f"passes, about {counted(steps, 'step')}" if steps else ""

    def preview(self, state: WizardState) -> Sequence[Content]:
        """Return what the run will be; the advanced options need its room."""
        return () if self._open or self.table.filter_text else run_preview(state)

    def _fits(self, state: WizardState) -> Content:
        fits = state.fits
        bad = [row for row in fits.value if row.status in (ItemStatus.FAILED, ItemStatus.WARNING)]
        if not state.members:
            return Content("")
        if fits.status in UNSETTLED:
            return muted("comparing with the machines' memory")
        if fits.status is ItemStatus.FAILED:
            return StatusMark.WARNING.show(fits.cause)
        if not bad and any(not row.needed or not row.free for row in fits.value):
            return muted("memory not known yet")
        if not bad:
            number = len(fits.value)
            machines = {1: "the machine", 2: "both machines"}.get(number, f"all {number} machines")
            return StatusMark.OK.show(f"fits {machines}")
        return MARKS[bad[0].status].show(", ".join(f"{row.name}: {row.label}" for row in bad))

    def _data(self, data: StatePart[DataSummary]) -> Content:
        if data.status in UNSETTLED:
            return muted("being read")
        if data.status is ItemStatus.FAILED:
            return StatusMark.PROBLEM.show(data.label)  # the cause stands under the row, and in the hint
        return MARKS[data.status].show(data_words(data))

    def draw(self) -> None:
        """Draw, with the cursor on the data set where it needs the user, and on "Continue" after one was chosen."""
        super().draw()
        data = self.state.data
        if not self.ready or not self.is_current or data.status in UNSETTLED:
            return
        if data.status is not ItemStatus.FAILED:
            if self._chose_data:
                self.table.select(GO)
        elif self.table.cursor == GO and self._judged_data != data.inputs:
            self.table.select(DATASET)
        self._chose_data, self._judged_data = False, data.inputs

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        if key == MODEL:
            fits = [line for row in state.fits.value for line in (_fit(row), *cause_lines(row))]
            return self._full_value(state.job.value.model) + fits
        if key == DATASET:
            return self._full_value(state.job.value.dataset) + _about_data(state.data)
        row = self._option_at(key)
        if row is None:
            return ()
        default = [muted(f"profile's value: {row.default}")] if row.changed else []
        problem = (
            cause_lines(Assessment(status=ItemStatus.FAILED, cause=row.problem, fix=row.spec.limits))
            if row.problem
            else []
        )
        return [*problem, *self._full_value(row.value), muted(", ".join(_about_option(row.spec))), *default]

    def _full_value(self, value: str) -> list[Content]:
        """Return a value in full if its cell cuts it."""
        return [literal(value)] if len(_shown(value)) > self.columns(self.state)[1].max_width else []

    def head(self, state: WizardState) -> Content:
        traffic_note = measures(state)
        notices = (
            (state.job.cause, "$text-error"),
            (state.job.fix, ""),
            (traffic_note, "$text-warning"),
        )
        return Content("\n").join([literal(text, style) for text, style in notices if text])

    def summary(self, state: WizardState) -> str:
        changed = sum(row.changed for row in state.job.value.options)
        return f"{changed} changed" if changed else ""

    def hint(self, state: WizardState) -> Content:
        invalid = [row for row in state.job.value.options if row.problem]
        if invalid:
            return literal(f"{invalid[0].name}: {invalid[0].problem}", "$text-error")
        unusual = [row for row in state.job.value.options if _unusual(row)]
        if unusual:
            return literal(f"{unusual[0].name} = {unusual[0].value}: {_unusual(unusual[0])}", "$text-warning")
        if state.data.status is ItemStatus.FAILED and self.table.cursor != DATASET:
            problems = state.data.value.problems
            return literal(problems[0] if problems else state.data.cause, "$text-error")
        return muted("These are good values. Change only what you know.")

    def offered_keys(self) -> tuple[Key, ...]:
        key = self.table.cursor if self.ready else GO
        keys = self.KEYS if self.state.data.value.salvageable else self.KEYS[:-1]
        if key in (GO, ""):
            return keys
        word = "Change" if key != ADVANCED else "Hide" if self._open else "Show"
        return (Key("enter", "go_on", word, main=True), *keys[1:])

    def _option_at(self, key: str) -> JobOption | None:
        name = key.removeprefix("option:")
        return next((row for row in self.state.job.value.options if row.name == name), None)

    # --------------------------------------------------------------------------------------------------- actions

    def action_go_on(self) -> None:
        key = self.table.cursor
        if key in (GO, ""):
            self.action_next()
        elif key == ADVANCED:
            self.action_advanced()
        elif key == PROFILE:
            self._ask_profile()
        elif key in (MODEL, DATASET):
            self._ask_reference(key)
        else:
            self._ask_option(self._option_at(key))

    def action_next(self) -> None:
        """Go on; if the data set cannot be used, go to its row, under which the reason stands."""
        if self.state.data.status is ItemStatus.FAILED:
            self.table.select(DATASET)
        else:
            super().action_next()

    def action_advanced(self) -> None:
        self._open = not self._open
        self.draw()

    def action_leave_out(self) -> None:
        self.do(leave_out())

    def action_reset(self) -> None:
        self.do(actions.reset_option(self.table.cursor.removeprefix("option:")))

    def _ask_profile(self) -> None:
        choices = [(row.name, row.entry.description) for row in self.state.home.value.profiles]

        def answered(name: str | None) -> None:
            if name:
                self.do(actions.choose_profile(name))

        heading = "Which profile should the values start from?"
        self.app.push_screen(ChoiceDialog(heading, value=self.state.answers.profile, choices=choices), answered)

    def _ask_reference(self, name: str) -> None:
        job = self.state.job.value
        names, value = (job.models, job.model) if name == MODEL else (job.datasets, job.dataset)
        accepted = "a folder, or a name on the Hugging Face hub or in config.ini"
        dialog = TextDialog(
            "Which model?" if name == MODEL else "Which data set?",
            [muted(f"Type {accepted}, or press down for the list.")],
            value=value,
            choices=[(name, "") for name in names],
        )
        # a folder that is dragged into a terminal comes in quotes
        self.app.push_screen(dialog, lambda text: self._set(name, text and text.strip(" '\"")))

    def _ask_option(self, row: JobOption | None) -> None:
        if row is None:
            return
        if row.spec.type == "flag":
            self._set(row.name, "false" if row.value == "true" else "true")
            return
        help_line, *limits = _about_option(row.spec) or [""]
        about = [muted(line) for line in (help_line, ", ".join(limits)) if line]
        if row.spec.choices:
            choices = [(choice, "") for choice in row.spec.choices]
            dialog: TextDialog = ChoiceDialog(row.name, about, value=row.value, choices=choices)
        else:
            dialog = TextDialog(row.name, about, value=row.value, problem_of=partial(_problem, row.name))
        self.app.push_screen(dialog, lambda text: self._set(row.name, text))

    def _set(self, name: str, text: str | None) -> None:
        if text is not None:
            self._chose_data = name == DATASET
            self.do(actions.set_option(name, text))

    def headless(self) -> str:
        answers = self.state.answers
        settings = [word for name, value in answers.options for word in ("--set", f"{name}={value}")]
        return command_line("distributed-train", answers.profile, *settings)


def _shown(reference: str) -> str:
    """Return a data set or model as its row shows it: a path below the home folder begins with ``~``."""
    return shown_path(reference) if Path(reference).is_absolute() else reference


def data_words(state_part: StatePart[DataSummary]) -> str:
    """Return a short description of a data set's contents."""
    data = state_part.value
    hours = f", {duration_text(data.hours * 3600)}" if data.hours else ""
    broken = f", {data.broken_count} broken" if data.broken_count else ""
    return f"{counted(data.samples, 'sample')}{hours}{broken}" if data.samples else state_part.label


def _about_data(state_part: StatePart[DataSummary]) -> list[Content]:
    data = state_part.value
    problems = [literal(problem, "$text-error") for problem in data.problems]
    lines = [*problems, *cause_lines(replace(state_part, cause="") if problems else state_part)]
    if data.splits:
        lines.append(muted("  ".join(f"{name} {count}" for name, count in data.splits)))
    if data.columns:
        lines.append(muted("columns: " + ", ".join(data.columns)))
    lines += [muted(note) for note in data.notes]
    lines += [literal(f"broken: {name}", "$text-warning") for name in data.broken[:_SHOWN_BROKEN]]
    more_broken = data.broken_count - len(data.broken[:_SHOWN_BROKEN])
    return [*lines, muted(f"and {more_broken} more")] if more_broken > 0 else lines


def _fit(row: Fit) -> Content:
    figures = f"needs {memory_text(row.needed)} of {memory_text(row.free)} free" if row.needed and row.free else ""
    mark = MARKS[row.status] if figures or row.status is not ItemStatus.OK else StatusMark.WAITING
    return join(mark.show(f"{row.name}: {row.label}"), muted(figures))


def _problem(name: str, value: str) -> str:
    """Return why a value cannot be that of an option, without the option's help, which the dialog shows."""
    problem = (check_value(name, value) or "").partition(" (")[0]
    return problem and f"'{value}': {problem}"


def _about_option(spec: OptionSpec) -> list[str]:
    return [text for text in (spec.help, spec.unit, spec.limits, f"--{spec.name.replace('_', '-')}") if text]


def _unusual(row: JobOption) -> str:
    """Return the remark on a value of the user's that is probably a slip; empty for others."""
    return (unusual_value(row.name, row.value) or "") if row.changed and not row.problem else ""


def _option(row: JobOption, narrow: bool, remark: str = "") -> TableRow:
    """``narrow``: in a few words, as the main ones always are; the whole help stands under the selected row. A
    ``remark`` takes the place of the words."""
    first_words = re.split(r"[;:(]", row.spec.help)[0].strip()
    help_text = _PLAIN.get(row.name) or (first_words if narrow else row.spec.help)
    style = "$text-error" if row.problem else "bold $text-primary" if row.changed else ""
    changed = " *" if row.changed else ""
    about = StatusMark.PROBLEM.show(row.problem) if row.problem else muted(remark or help_text)
    if unusual := _unusual(row):
        about = StatusMark.WARNING.show(f"{remark}: {unusual}" if remark else unusual)
    value = Content.assemble(literal(row.spec.shown(row.value) or "-", style), (changed, "$text-primary"))
    return TableRow(f"option:{row.name}", (literal(row.name.replace("_", " ")), value, about))
