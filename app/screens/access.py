"""Access: the way to each machine in four stages; a first meeting is confirmed, a password asked for once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.content import Content

from app.console import command_line, visible
from app.screens.steering import cause_lines, shown_state, shown_status
from app.screens.step_screen import GO_ON, NEXT, StepScreen
from app.shell.base_app import MusterApp
from app.shell.dialogs import TextDialog, TrustDialog
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.text import Mark, literal, muted
from app.wizard import actions
from app.wizard.records import Access, Need, Status
from app.wizard.state import WizardState
from app.wizard.steps import Step

_WENT = {True: Status.OK, False: Status.FAILED, None: Status.WAITING}
_STAGES = ("reach", "host key", "login", "shell")
_COLUMNS = (
    Column("name", "machine", most=28, least=14),
    *(Column(stage, stage, most=8, least=5) for stage in _STAGES),
    Column("state", "state", most=30, least=10),
)


class AccessScreen(StepScreen):
    """May we log in there?"""

    STEP = Step.ACCESS
    HEADING = "Access"
    HELP = (
        "The way to a machine has four stages: it answers, it shows its host key, it lets us in, it runs commands. "
        "At the first meeting compare the fingerprint with what the machine itself prints: enter shows it, a accepts. "
        "A password is asked for once, installs a key, and is kept nowhere. "
        "A machine whose host key changed is refused: there is no way round it here. "
        "What fails is tried again by itself every few seconds, so mending the machine is enough."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("s", "skip", "Skip", "Go on without the selected machine, or take it back in."),
        Key("r", "retry", "Retry", "Try the selected machine again; takes a skipped one back in."),
    )

    def columns(self, state: WizardState) -> Sequence[Column]:
        return _COLUMNS

    def rows(self, state: WizardState) -> Sequence[Row]:
        app = self.steered
        return [_row(app, row, row.key in state.answers.skipped) for row in state.access]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        row = self._selected()
        if row is None:
            return ()
        system = row.report.system if row.report is not None else ""
        lines = cause_lines(row)
        if row.need is not Need.NOTHING:
            lines = [literal(row.cause, Mark.ASKING.style)]
        if row.need is Need.TRUST:
            lines += [literal(row.fingerprint, "bold"), muted(f"compare there: {row.compare}")]
        return [*lines, *([muted(f"{row.place}  {system}".rstrip())] if row.place else [])]

    def summary(self, state: WizardState) -> str:
        good = sum(row.status is Status.OK for row in state.access)
        return f"{good} of {len(state.access)} let us in"

    def hint(self, state: WizardState) -> Content:
        row = self._selected()
        if row is not None and row.need is Need.TRUST:
            return literal("First meeting: enter compares its key with you.", "$text-warning")
        if row is not None and row.need is Need.PASSWORD:
            return literal("Enter asks for its password, once; it installs a key and is kept nowhere.", "$text-warning")
        if any(row.status is Status.FAILED for row in state.access):
            return muted("What fails is tried again by itself every few seconds.")
        return muted("Keys only: no password is kept anywhere.")

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
        """To a machine that waits for the person, else to the next step; to one that failed where it keeps us here."""
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
                self.do(actions.TrustKey(row.key, row.fingerprint))

        self.app.push_screen(TrustDialog(row.name, row.fingerprint, row.compare), answered)

    def _ask_password(self, row: Access) -> None:
        about = [muted("Used once to install a key of ours there; kept nowhere.")]

        def answered(password: str | None) -> None:
            if password:
                self.do(actions.GivePassword(row.key, password))

        dialog = TextDialog(f"Password of {row.place or row.name}", about, accept="Install a key", secret=True)
        self.app.push_screen(dialog, answered)

    def action_skip(self) -> None:
        key = self.table.cursor
        self.do(actions.Retry(key) if key in self.state.answers.skipped else actions.Skip(key))

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
    state = shown_status(app, Status.SKIPPED) if skipped else shown_state(app, row)
    if row.need is not Need.NOTHING and not skipped:
        state = Mark.ASKING.show(visible(row.label), ascii_only=app.ascii_only)
    return Row(row.key, (literal(row.name), *cells, state))


def _stage(app: MusterApp, row: Access, status: Status) -> Content:
    """A stage that ended for want of an answer has not failed."""
    if status is Status.FAILED and row.need is not Need.NOTHING:
        return Mark.ASKING.show("", ascii_only=app.ascii_only)
    return shown_status(app, status, "")
