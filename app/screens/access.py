"""Access: the login on each machine in four stages; a new host key is confirmed, a password asked for once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.content import Content

from app.console import command_line, visible
from app.screens.step_screen import GO_ON, NEXT, StepScreen, cause_lines, shown_state, shown_status
from app.shell.base_app import MusterApp
from app.shell.dialogs import TextDialog, TrustDialog
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.text import Mark, literal, muted
from app.wizard import actions
from app.wizard.records import Access, Need, Status
from app.wizard.state import Step, WizardState

_WENT = {True: Status.OK, False: Status.FAILED, None: Status.WAITING}
_STAGES = ("reach", "host key", "login", "shell")


class AccessScreen(StepScreen):
    """Can Muster log in there?"""

    STEP = Step.ACCESS
    COLUMNS = (
        Column("name", "machine", most=28, least=14),
        *(Column(stage, stage, most=8, least=5) for stage in _STAGES),
        Column("state", "state", most=30, least=10),
    )
    HELP = (
        "Logging in has four stages: the machine answers, it shows its host key, it accepts the login, it runs "
        "commands. Compare a new host key with the fingerprint that the machine itself prints: enter shows it, a "
        "accepts it. A password is asked for once, to install a key, and is not stored. "
        "A machine whose host key has changed is refused; no key here overrides that. "
        "Failed logins are retried every few seconds: fixing the machine is enough."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("s", "skip", "Skip", "Continue without the selected machine, or include it again."),
        Key("r", "retry", "Retry", "Try the selected machine again; includes a skipped one again."),
    )

    def rows(self, state: WizardState) -> Sequence[Row]:
        return [_row(self.steered, row, row.key in state.answers.skipped) for row in state.access]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        row = self._selected()
        if row is None:
            return ()
        system = row.report.system if row.report is not None else ""
        lines = cause_lines(row)
        if row.need is Need.PASSWORD:
            lines = [literal(row.cause, Mark.ASKING.style)]
        elif row.need is Need.TRUST:
            lines = [literal("its host key is new here, with the fingerprint", Mark.ASKING.style),
                     literal(row.fingerprint, "bold"), muted(f"compare there: {row.compare}")]  # fmt: skip
        return [*lines, *([muted(f"{row.place}  {system}".rstrip())] if row.place else [])]

    def summary(self, state: WizardState) -> str:
        good = sum(row.status is Status.OK for row in state.access)
        return f"{good} of {len(state.access)} accept the login"

    def hint(self, state: WizardState) -> Content:
        row = self._selected()
        if row is not None and row.need is Need.TRUST:
            return literal("New host key: press enter to compare it.", "$text-warning")
        if row is not None and row.need is Need.PASSWORD:
            return literal("Enter asks for its password once, to install a key; it is not stored.", "$text-warning")
        if any(row.status is Status.FAILED for row in state.access):
            return muted("Failed logins are retried every few seconds.")
        return muted("Muster logs in with keys; passwords are not stored.")

    def offered_keys(self) -> tuple[Key, ...]:
        row = self._selected() if self.ready else None
        words = {Need.TRUST: "Compare key", Need.PASSWORD: "Password"}
        if row is None or row.need is Need.NOTHING:
            return self.KEYS
        return (Key("enter", "go_on", words[row.need], main=True), *self.KEYS[1:])

    def _selected(self) -> Access | None:
        return next((row for row in self.state.access if row.key == self.table.cursor), None)

    def action_go_on(self) -> None:
        row = self._selected()
        skipped = row is not None and row.key in self.state.answers.skipped
        if row is None or row.need is Need.NOTHING or skipped:
            self._to_the_next_need()
        elif row.need is Need.TRUST:
            self._ask_trust(row)
        else:
            self._ask_password(row)

    def _to_the_next_need(self) -> None:
        """To a machine that waits for the person, else to the next step; to one that failed where it keeps one here."""
        kept = [row for row in self.state.access if row.key not in self.state.answers.skipped]
        needy = [row for row in kept if row.need is not Need.NOTHING]
        failed = [row for row in kept if row.status is Status.FAILED]
        if needy:
            self.table.select(needy[0].key)
            return
        self.action_next()
        if failed and self.table.cursor not in [row.key for row in failed]:
            self.table.select(failed[0].key)

    def _ask_trust(self, row: Access) -> None:
        def answered(same: bool | None) -> None:
            if same:
                self.do(actions.trust_key(row.key, row.fingerprint))

        self.app.push_screen(TrustDialog(row.name, row.fingerprint, row.compare), answered)

    def _ask_password(self, row: Access) -> None:
        about = [muted("Used once, to install a key there; not stored.")]

        def answered(password: str | None) -> None:
            if password:
                self.steered.wizard.give_password(row.key, password)

        dialog = TextDialog(f"Password of {row.place or row.name}", about, accept="Install a key", secret=True)
        self.app.push_screen(dialog, answered)

    def action_skip(self) -> None:
        key = self.table.cursor
        self.do(actions.retry(key) if key in self.state.answers.skipped else actions.skip(key))

    def copied(self) -> str:
        """What is to be typed about the selected machine."""
        row = self._selected()
        wanted = (row.compare or row.fix) if row is not None else ""
        return wanted or super().copied()

    def headless(self) -> str:
        names = [row.name for row in self.state.picked if not row.here]
        return command_line("access", *names)


def _row(app: MusterApp, row: Access, skipped: bool) -> Row:
    passed = {stage.value: went for stage, went in row.report.stages.items()} if row.report is not None else {}
    cells = [_stage(app, row, _WENT[passed.get(stage)]) for stage in _STAGES]
    state = shown_state(app, row)
    if skipped:
        state = shown_status(app, Status.SKIPPED)
    elif row.need is not Need.NOTHING:
        state = Mark.ASKING.show(visible(row.label), ascii_only=app.ascii_only)
    return Row(row.key, (literal(row.name), *cells, state))


def _stage(app: MusterApp, row: Access, status: Status) -> Content:
    """A stage that ended for want of an answer has not failed."""
    if status is Status.FAILED and row.need is not Need.NOTHING:
        return Mark.ASKING.show("", ascii_only=app.ascii_only)
    return shown_status(app, status, "")
