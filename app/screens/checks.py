"""Checks: what was found on each machine, what is needed, and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, NEXT, StepScreen, cause_lines, shown_state, shown_status
from app.shell.base_app import MusterApp
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.text import literal, muted
from app.wizard import actions
from app.wizard.assessment import of_finding
from app.wizard.records import GOOD, Check, Status
from app.wizard.state import Step, WizardState

if TYPE_CHECKING:  # loads SSH, which the first screen does without
    from distributed.checks.findings import Finding

_BETWEEN = "|"


class ChecksScreen(StepScreen):
    """Are they ready to train?"""

    STEP = Step.CHECKS
    COLUMNS = (
        Column("what", "machine, check", most=28, least=14),
        Column("state", "state", most=18, least=8),
        Column("seen", "found", most=48, least=14),
        Column("needed", "needed", most=34, least=10, rank=1),
    )
    HELP = (
        "All machines are checked at the same time: Python, torch with a small calculation on every device, disk, "
        "memory, system, power and sleep, clock, data, ports, versions. A warning costs time or may end a run; a "
        "problem keeps a machine from training. 'f' fixes the selected problem where that is safe to do from here, "
        "'F' all of them; packages go into Muster's folder there, and 'clean' removes it again."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("f", "fix", "Fix", "Fix the selected problem, or all of the selected machine."),
        Key("F", "fix_all", "Fix all", "Fix everything that is safe to fix, on all machines."),
        Key("s", "skip", "Skip", "Continue without the selected machine, or include it again."),
        Key("o", "show_all", "All", "Also show the checks that passed, or only the others."),
    )

    _all = False

    def rows(self, state: WizardState) -> Sequence[Row]:
        return [row for check in state.checks for row in self._machine(check, check.key in state.answers.skipped)]

    def _machine(self, check: Check, skipped: bool) -> list[Row]:
        app = self.steered
        good = sum(finding.level == "ok" for finding in check.findings)
        seen = muted(f"{good} of {len(check.findings)} passed" if check.findings else "")
        shown = shown_status(app, Status.SKIPPED) if skipped else shown_state(app, check)
        head = Row(check.key, (literal(check.name, "bold"), shown, seen, Content("")))
        kept = [finding for finding in check.findings if self._all or finding.level != "ok"]
        return [head, *([] if skipped else [_finding(app, check, finding) for finding in kept])]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        machine, _, _ = key.partition(_BETWEEN)
        check = next((check for check in state.checks if check.key == machine), None)
        finding = self._finding(state, key)
        if finding is not None:
            safe = [muted("f fixes this from here")] if finding.safe and finding.fix else []
            needed = [muted(f"needed: {finding.needed}")] if finding.needed else []
            return [*needed, *cause_lines(of_finding(finding)), *safe]
        return cause_lines(check) if check is not None else ()

    def _finding(self, state: WizardState, key: str) -> Finding | None:
        machine, _, name = key.partition(_BETWEEN)
        findings = [finding for check in state.checks if check.key == machine for finding in check.findings]
        return next((finding for finding in findings if name and finding.check == name), None)

    def summary(self, state: WizardState) -> str:
        ready = sum(check.status in GOOD for check in state.checks)
        return f"{ready} of {len(state.checks)} ready"

    def hint(self, state: WizardState) -> Content:
        if any(check.fixable for check in state.checks):
            return muted("F fixes what is safe to fix; nothing else is changed.")
        return muted("Checking changes nothing on any machine.")

    def action_fix(self) -> None:
        machine, _, check = self.table.cursor.partition(_BETWEEN)
        self.do(actions.fix(machine, check))

    def action_fix_all(self) -> None:
        self.do(actions.fix_all())

    def action_skip(self) -> None:
        key = self.table.cursor.partition(_BETWEEN)[0]
        self.do(actions.retry(key) if key in self.state.answers.skipped else actions.skip(key))

    def action_retry(self) -> None:
        self.do(actions.retry(self.table.cursor.partition(_BETWEEN)[0]))

    def action_show_all(self) -> None:
        self._all = not self._all
        self.draw()

    def copied(self) -> str:
        finding = self._finding(self.state, self.table.cursor)
        return finding.fix if finding is not None and finding.fix else super().copied()

    def headless(self) -> str:
        return command_line("distributed-check", self.state.answers.profile)


def _finding(app: MusterApp, check: Check, finding: Finding) -> Row:
    return Row(
        f"{check.key}{_BETWEEN}{finding.check}",
        (
            literal("  " + finding.check),
            shown_state(app, of_finding(finding)),
            literal(finding.seen),
            muted(finding.needed),
        ),
    )
