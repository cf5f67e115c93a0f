"""Access: the login on each machine that takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, MARKS, NEXT, StepScreen, cause_lines, shown_state, shown_status
from app.shell.base_app import MusterApp
from app.shell.dialogs import Dialog, TextDialog
from app.shell.keys import Key
from app.shell.text import StatusMark, TableColumn, TableRow, literal, muted
from app.wizard.state import actions
from app.wizard.state.dependencies import same_password_question
from app.wizard.state.records import UNSETTLED, Access, AccessNeed, ItemStatus
from app.wizard.state.state import Step, TaskKind, WizardState
from distributed.ssh.keys.host_keys import COMPARED

_STAGE_STATUS = {True: ItemStatus.OK, False: ItemStatus.FAILED, None: ItemStatus.WAITING}
_STAGES = ("reach", "host key", "login", "shell")


class AcceptDialog(Dialog):
    """Asks for consent to what can do harm; every key but one, enter included, means no.

    Args:
        accept: label of the key that accepts.
    """

    MUST_BE_READ = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "accept", show=False),
        Binding("enter,n", "close", show=False),
    ]

    def __init__(self, heading: str, accept: str, *lines: Content) -> None:
        super().__init__(heading, *lines)
        self._accept = accept

    def keys(self) -> tuple[Key, ...]:
        return (Key("a", "accept", self._accept), Key("escape", "close", "Not now", main=True))

    def action_accept(self) -> None:
        self.dismiss(True)


class TrustDialog(AcceptDialog):
    """Asks whether a host key belongs to the intended machine."""

    def __init__(self, machine: str, fingerprint: str, compare: str) -> None:
        start, end = fingerprint[:-COMPARED], fingerprint[-COMPARED:]
        super().__init__(
            f"Is this {machine}?",
            "They match",
            literal("This computer does not know it yet. The fingerprint of its host key is:", "$text-muted"),
            Content.assemble(literal(start), literal(end, "bold reverse")),
            literal("The machine itself must print the same one. Type there:", "$text-muted"),
            literal(compare, "bold"),
            Content(""),
            Content.assemble("Accept it only if the two are equal up to the end, ", literal(end, "bold"), "."),
        )


class AccessScreen(StepScreen):
    """Can Muster log in there?"""

    STEP = Step.ACCESS
    COLUMNS = (
        TableColumn("name", "machine", max_width=28, min_width=14),
        *(TableColumn(stage, stage, max_width=8, min_width=5) for stage in _STAGES),
        TableColumn("state", "state", max_width=30, min_width=10),
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
        Key("u", "user", "User", "Log in on the selected machine as another user."),
        Key("r", "retry", "Retry", "Try the selected machine again; includes a skipped one again."),
    )

    _opening = ""
    """Key of the machine that the user has let Muster in on."""

    def draw(self) -> None:
        """Draw. Once the machine that the user was busy with is done, offer its password for others, or select the next
        one that needs something."""
        super().draw()
        row = self.state.access_of(self._opening)
        if row is None or not self.ready or not self.is_current:
            return
        if self.state.is_under_way(TaskKind.INSTALL_KEY, row.key):
            return
        if row.status is ItemStatus.OK:
            self._opening = ""
            self._offer_or(row, self._leave_the_done)

    def _leave_the_done(self) -> None:
        """Select a machine that needs the user, if the selected one is done."""
        row, waiting = self._selected(), self._waiting()
        if row is not None and row.status is ItemStatus.OK and waiting:
            self.table.select(waiting[0])

    def _offer_or(self, row: Access, otherwise: Callable[[], None]) -> None:
        """Offer the password that was accepted for the user of this machine for all that wait for one of that user; do
        something else if there is none, or it is not the same there."""
        wizard = self.steered.wizard
        alike = wizard.password_offer(row)
        if not alike:
            otherwise()
            return

        def answered(agreed: bool | None) -> None:
            wizard.answer_offer(alike, bool(agreed))
            if agreed:
                self._opening = alike[-1].key
            else:
                otherwise()

        where = ", ".join(one.place or one.name for one in alike)
        about = muted(f"It is used once at {where}, to install a key there; not stored.")
        self.app.push_screen(AcceptDialog(same_password_question(alike), "Use it", about), answered)

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        return [_access_row(self.steered, row, row.key in state.answers.skipped) for row in state.access]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        row = self._selected()
        if row is None:
            return ()
        system = row.report.system if row.report is not None else ""
        lines = cause_lines(row)
        if row.need in (AccessNeed.PASSWORD, AccessNeed.APPROVAL):
            lines = [literal(row.cause, StatusMark.ASKING.style)]
        elif row.need is AccessNeed.TRUST:
            lines = [literal("its host key is new here, with the fingerprint", StatusMark.ASKING.style),
                     literal(row.fingerprint, "bold"), muted(f"compare there: {row.compare}")]  # fmt: skip
        return [*lines, *([muted(f"{row.place}  {system}".rstrip())] if row.place else [])]

    def summary(self, state: WizardState) -> str:
        included = [row for row in state.access if row.status is not ItemStatus.SKIPPED]
        good = sum(row.status is ItemStatus.OK for row in included)
        return f"{good} of {len(included)} accept the login"

    def hint(self, state: WizardState) -> Content:
        row = self._selected()
        if row is not None and row.need is AccessNeed.TRUST:
            return literal("New host key: press enter to compare it.", "$text-warning")
        if row is not None and row.need is AccessNeed.PASSWORD:
            asked = "Enter asks for its password, once, to install a key."
            return literal(asked, "$text-warning")
        if row is not None and row.need is AccessNeed.APPROVAL:
            return literal("Enter shows what its hosts file can run on this computer.", "$text-warning")
        if any(row.status is ItemStatus.FAILED for row in state.access):
            return muted("Failed logins are retried every few seconds.")
        return muted("Muster logs in with keys; passwords are not stored.")

    def offered_keys(self) -> tuple[Key, ...]:
        row = self._selected() if self.ready else None
        words = {AccessNeed.TRUST: "Compare key", AccessNeed.PASSWORD: "Password", AccessNeed.APPROVAL: "Approve"}
        if row is None or row.need is AccessNeed.NOTHING:
            return self.KEYS
        return (Key("enter", "go_on", words[row.need], main=True), *self.KEYS[1:])

    def awaited_by(self, key: str) -> str:
        """Enter waits until its machine has answered: a password for a dialog may be typed behind it."""
        row = self._selected() if self.ready and key == "enter" else None
        is_open = row is not None and row.status in UNSETTLED and row.key not in self.state.answers.skipped
        return f"{row.name} has not answered yet" if row is not None and is_open else ""

    def _selected(self) -> Access | None:
        return next((row for row in self.state.access if row.key == self.table.cursor), None)

    def action_go_on(self) -> None:
        row = self._selected()
        skipped = row is not None and row.key in self.state.answers.skipped
        if row is None or row.need is AccessNeed.NOTHING or skipped:
            self._to_the_next_need()
        elif row.need is AccessNeed.TRUST:
            self._ask_trust(row)
        elif row.need is AccessNeed.APPROVAL:
            self._ask_approval(row)
        else:
            self._offer_or(row, lambda: self._ask_password(row))

    def _waiting(self, *needs: AccessNeed) -> list[str]:
        """Return the keys of the machines that need the user, for any of ``needs`` or, without them, for anything."""
        rows = [row for row in self.state.access if row.key not in self.state.answers.skipped]
        return [row.key for row in rows if row.need is not AccessNeed.NOTHING and (not needs or row.need in needs)]

    def _to_the_next_need(self) -> None:
        """Select a machine that needs the user, else go to the next step; if a failed one prevents that, select it."""
        included = [row for row in self.state.access if row.key not in self.state.answers.skipped]
        waiting = self._waiting()
        failed = [row for row in included if row.status is ItemStatus.FAILED]
        if waiting:
            self.table.select(waiting[0])
            return
        self.action_next()
        if failed and self.table.cursor not in [row.key for row in failed]:
            self.table.select(failed[0].key)

    def _ask_trust(self, row: Access) -> None:
        def answered(keys_match: bool | None) -> None:
            if keys_match:
                self._opening = row.key
                self.do(actions.trust_key(row.key, row.fingerprint))
                unknown = [key for key in self._waiting(AccessNeed.TRUST) if key != row.key]
                if unknown:  # meanwhile Muster logs in
                    self.table.select(unknown[0])

        self.app.push_screen(TrustDialog(row.name, row.fingerprint, row.compare), answered)

    def _ask_approval(self, row: Access) -> None:
        def answered(approved: bool | None) -> None:
            if approved:
                self.do(actions.approve(row.key))

        demands = [literal(line) for line in (row.report.demands if row.report is not None else ())]
        dialog = AcceptDialog(f"Use the hosts file of {row.name}?", "Use it", *demands)
        self.app.push_screen(dialog, answered)

    def _ask_password(self, row: Access) -> None:
        about = [muted("Used once, to install a key there; not stored.")]

        def answered(password: str | None) -> None:
            if password:
                self._opening = row.key
                self.steered.wizard.give_password(row.key, password)

        dialog = TextDialog(
            f"Password of {row.place or row.name}",
            about,
            accept="Install a key",
            secret=True,
            needed="Type its password, or close this with esc.",
        )
        self.app.push_screen(dialog, answered)

    def action_user(self) -> None:
        row = self._selected()
        if row is None:
            return
        user = row.report.user if row.report is not None else ""

        def answered(name: str | None) -> None:
            if name:
                self.do(actions.set_user(row.key, name))

        self.app.push_screen(TextDialog(f"Log in on {row.name} as which user?", (), value=user), answered)

    def action_skip(self) -> None:
        self.toggle_skip(self.table.cursor)

    def copied(self) -> str:
        """Return the command or fix of the selected machine."""
        row = self._selected()
        command = row.report.command if row is not None and row.report is not None else ""
        text = (row.compare or command or row.fix) if row is not None else ""
        return text or super().copied()

    def headless(self) -> str:
        logins = [row.entry.login for row in self.state.picked if not row.here]
        return command_line("machines", "access", *logins)


def _access_row(app: MusterApp, row: Access, skipped: bool) -> TableRow:
    stages = row.report.stages if row.report is not None else {}
    passed = {stage.value: has_passed for stage, has_passed in stages.items()}
    cells = [_stage(row, _STAGE_STATUS[passed.get(stage)]) for stage in _STAGES]
    state = shown_state(app, row)
    if skipped:
        state = shown_status(app, ItemStatus.SKIPPED)
    elif row.need is not AccessNeed.NOTHING:
        state = StatusMark.ASKING.show(row.label)
    return TableRow(row.key, (literal(row.name), *cells, state))


def _stage(row: Access, status: ItemStatus) -> Content:
    """Return the mark of a stage; one that waits for the user has not failed."""
    asking = status is ItemStatus.FAILED and row.need is not AccessNeed.NOTHING
    return (StatusMark.ASKING if asking else MARKS[status]).show("")
