"""Home: live and earlier runs, a new set-up, and a check of this computer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual.content import Content

from app.console import command_line, profile_text
from app.screens.step_screen import MARKS, StepScreen, cause_lines
from app.shell.keys import EVERYWHERE, Key
from app.shell.text import StatusMark, TableColumn, TableRow, join, literal, muted
from app.wizard.state import actions
from app.wizard.state.assessment import of_finding, of_run
from app.wizard.state.dependencies import MEASURES
from app.wizard.state.records import UNSETTLED, KnownProfile, Presence
from app.wizard.state.state import Step, WizardState
from profiles.errors import counted

if TYPE_CHECKING:  # a module that loads SSH, which the first screen does without
    from distributed.checks.findings import Finding
    from training.records.runs import RunSummary

NEW, DOCTOR = "new", "doctor"
_AROUND = 10
"""Lines of the screen outside the list."""
_BESIDE = 9
"""Cells of a line outside its two columns: margins, the cursor, gaps, the scroll bar."""
_FINISHED = 5
"""Finished runs that are listed; ``runs list`` has them all."""


class HomeScreen(StepScreen):
    """What do you want to do?"""

    STEP = Step.HOME
    COLUMNS = (TableColumn("name", "", max_width=30), TableColumn("about", "", max_width=90))
    HEADED = False
    HELP = (
        "Enter on 'New set-up' takes you through machines, job and strategy to a plan. "
        "Enter on a run shows it live; it continues when you leave. "
        "Enter on a profile opens its plan at once."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("enter", "go_on", "Open", "Open what is selected: a run, a new set-up, a profile.", main=True),
        Key("n", "new", "New", "A new set-up."),
        Key("d", "doctor", "Doctor", "Check this computer: Python, devices, disk, memory."),
        Key("r", "retry", "Reload", "Read runs and profiles again.", shown=False),
    )

    _watched = False

    def awaited_by(self, key: str) -> str:
        home = self.state.home
        return "runs and profiles are being read" if home.status in UNSETTLED and not home.value.profiles else ""

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        live = [run for run in state.home.value.runs if run.live]
        finished = [run for run in state.home.value.runs if not run.live][:_FINISHED]
        saved = [profile for profile in state.home.value.profiles if profile.saved]
        shipped = [profile for profile in state.home.value.profiles if not profile.saved]
        findings = [_finding(finding) for finding in state.doctor.value]
        computer = _section("This computer", [_line(DOCTOR, "Doctor", _doctor_words(state)), *findings])
        sections = [
            *([computer] if findings else ()),
            _section("Running now", [_run(run) for run in live]),
            _section("Start", [_line(NEW, "New set-up", "machines, job, strategy; then a plan to confirm")]),
            _section("Saved profiles", [_profile(profile, state.presence_of(profile)) for profile in saved]),
            _section("Ready profiles", [_profile(profile, state.presence_of(profile)) for profile in shipped]),
            _section("Finished runs", [_run(run) for run in finished]),
            *(() if findings else [computer]),
        ]
        filled = [section for section in sections if section]
        has_gaps = sum(map(len, filled)) + len(filled) <= self.app.size.height - _AROUND
        return [row for index, section in enumerate(filled) for row in (*_gap(index if has_gaps else 0), *section)]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        kind, _, name = key.partition(":")
        if kind == "profile":
            profiles = [profile for profile in state.home.value.profiles if profile.name == name]
            return [line for profile in profiles for line in self._about(profile)]
        if kind == "finding":
            return [line for row in state.doctor.value if row.check == name for line in cause_lines(of_finding(row))]
        if kind == "run":
            from app.report import what_next  # the reader of runs, which the first paint does without

            runs = [run for run in state.home.value.runs if run.run_id == name]
            about = [muted(line) for run in runs for line in (str(run.path), *what_next(run))]
            return about + [line for run in runs for line in cause_lines(of_run(run))]
        return ()

    def _about(self, profile: KnownProfile) -> list[Content]:
        entry, presences = profile.entry, self.state.presence_of(profile)
        machines = [_presence(presence) for presence in presences]
        about = [muted(entry.description)] if self._cuts(_profile(profile, presences)) else []
        any_far = any(presence.far for presence in presences)
        traffic_note = [literal(f"enter {MEASURES.format(names='its machines')}", "$text-warning")] if any_far else []
        problem = [literal(entry.error, StatusMark.PROBLEM.style)] if entry.error else []
        return [*about, *([join(*machines)] if machines else []), *traffic_note, *problem]

    def _cuts(self, row: TableRow) -> bool:
        """Whether the second cell of a row has no room for its text."""
        names = max((table_row.cells[0].cell_length for table_row in self.rows(self.state)), default=0)
        width = self.app.size.width - _BESIDE - min(names, self.COLUMNS[0].max_width)
        return row.cells[1].cell_length > min(width, self.COLUMNS[1].max_width)

    def right_keys(self) -> tuple[Key, ...]:
        leave = replace(EVERYWHERE[0], label="Leave", help="Leave; runs continue.")
        return EVERYWHERE if self.state.doctor.value else (leave, *EVERYWHERE[1:])

    def hint(self, state: WizardState) -> Content:
        if state.home.cause:
            return literal(" ".join(filter(None, (state.home.cause, state.home.fix))), "$text-error")
        return muted("Nothing is trained or saved before you confirm a plan.")

    def on_screen_resume(self) -> None:
        if self._watched:  # a run may have ended in its dashboard
            self._watched = False
            self.action_retry()

    def action_go_on(self) -> None:
        kind, _, name = self.table.cursor.partition(":")
        if kind in (NEW, ""):
            self.action_new()
        elif kind in (DOCTOR, "finding"):
            self.action_doctor()
        elif kind == "profile":
            self.do(actions.rerun(name))
        elif kind == "run":
            path = next((run.path for run in self.state.home.value.runs if run.run_id == name), None)
            if path is not None:
                self._watched = True
                self.steered.open_dashboard(path)

    def action_new(self) -> None:
        self.do(actions.new_setup())

    def action_doctor(self) -> None:
        self.do(actions.doctor())

    def action_back(self) -> None:
        if self.end_filters():
            return
        if self.state.doctor.value:
            self.do(actions.close_doctor())
        else:
            self.steered.action_leave()

    def headless(self) -> str:
        kind, _, name = self.table.cursor.partition(":")
        if kind == "run":
            return command_line("runs", "attach", name)
        if kind in (DOCTOR, "finding"):
            return command_line("machines", "doctor", *([name] if name else []))
        return command_line("distributed-train", name if kind == "profile" else "demo")


def _section(title: str, rows: Sequence[TableRow]) -> list[TableRow]:
    return [TableRow(f"section:{title}", (muted(title), Content("")), selectable=False), *rows] if rows else []


def _gap(index: int) -> list[TableRow]:
    """An empty line before every section but the first."""
    return [TableRow(f"gap:{index}", (Content(""),), selectable=False)] if index else []


def _line(key: str, name: str, about: str) -> TableRow:
    return TableRow(key, (Content("  " + name), muted(about)))


def _run(run: RunSummary) -> TableRow:
    from distributed.planning.run_time import took_text  # pydantic, which the first paint does without

    assessment = of_run(run)
    mark = StatusMark.RUNNING if run.live else MARKS[assessment.status]
    took = took_text(run.seconds) if run.seconds is not None else ""
    about = join(mark.show(assessment.label), muted(took), muted(run.started_text), muted(run.run_id))
    return TableRow(f"run:{run.run_id}", (literal("  " + (profile_text(run.profile) or run.run_id)), about))


def _profile(profile: KnownProfile, machines: Sequence[Presence]) -> TableRow:
    presences = [machine.present for machine in machines]
    online = sum(present is True for present in presences)
    machines_text = counted(len(presences), "machine")
    is_known = any(present is not None for present in presences)
    online_text = f"{online} of {machines_text} online" if is_known else f"looking for {machines_text}"
    problem = StatusMark.PROBLEM.show("") if profile.entry.error else ""
    style = "$text-success" if presences and all(presences) else "$text-muted"
    about = join(problem, literal(online_text if presences else "", style), muted(profile.entry.description))
    return TableRow(f"profile:{profile.name}", (literal("  " + profile.name), about))


def _presence(machine: Presence) -> Content:
    look = {True: StatusMark.ONLINE, False: StatusMark.OFFLINE, None: StatusMark.WAITING}[machine.present]
    word = {True: "online", False: "not found", None: "not known yet"}[machine.present]
    return look.show(f"{machine.name}: {word}")


def _doctor_words(state: WizardState) -> str:
    problem_count = sum(finding.level != "ok" for finding in state.doctor.value)
    if not state.doctor.value:
        return "check Python, devices, disk and memory here"
    problems = counted(problem_count, "problem") if problem_count else "no problems"
    return f"{counted(len(state.doctor.value), 'check')}, {problems}"


def _finding(finding: Finding) -> TableRow:
    assessment = of_finding(finding)
    about = join(MARKS[assessment.status].show(assessment.label), muted(finding.seen))
    return TableRow(f"finding:{finding.check}", (literal("    " + finding.check), about))
