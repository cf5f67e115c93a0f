"""Machines and Access: selecting machines on the network, and the login on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, MARKS, NEXT, StepScreen, cause_lines, shown_state, shown_status
from app.shell.base_app import MusterApp
from app.shell.dialogs import Dialog, TextDialog, refusal_by
from app.shell.keys import Key
from app.shell.row_table import RowTable
from app.shell.text import StatusMark, TableColumn, TableRow, literal, muted
from app.wizard.state import actions
from app.wizard.state.neighbours import ask_neighbours
from app.wizard.state.observations import origin_of
from app.wizard.state.records import Access, AccessNeed, ItemStatus, MachineRow
from app.wizard.state.state import Step, WizardState
from distributed.ssh.keys.host_keys import COMPARED

if TYPE_CHECKING:  # takes a while to load, which the first screen does without
    from distributed.discovery.machine_identity import FoundPath

_STAGE_STATUS = {True: ItemStatus.OK, False: ItemStatus.FAILED, None: ItemStatus.WAITING}
_SEARCHED = 10.0
"""Seconds after which a search seldom finds more."""
_STAGES = ("reach", "host key", "login", "shell")


class MachinesScreen(StepScreen):
    """Which machines take part?"""

    STEP = Step.MACHINES
    COLUMNS = (
        TableColumn("name", "machine", max_width=36, min_width=14),
        TableColumn("state", "state", max_width=18, min_width=9),
        TableColumn("chip", "chip or GPU", max_width=26, min_width=14, rank=1),
        TableColumn("memory", "memory", right=True, max_width=9, min_width=6, rank=2),
        TableColumn("system", "system", max_width=22, min_width=12, rank=4),
        TableColumn("found", "found by", max_width=26, min_width=12, rank=3),
        TableColumn("paths", "paths", right=True, max_width=5, min_width=4, rank=5),
    )
    HELP = (
        "Machines appear as they are found: those that announce themselves (a Mac with Remote Login on does), those in "
        "your SSH configuration and hosts file, and those you add. Each machine is one row, however many names, "
        "addresses and cables it has: its SSH host key identifies it.\n"
        "Machine missing? On a Mac: System Settings > General > Sharing > Remote Login. On Linux: install and start "
        "openssh-server. Or add it with 'a'."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("space", "pick", "Pick", "Include the selected machine, or leave it out."),
        Key("a", "add", "Add", "Add a machine that is not listed: user@host, as you would type it after ssh."),
        Key("s", "ask_neighbours", "Ask", "Ask the machines that this computer has met on its networks for SSH."),
        Key("d,delete", "remove", "Remove", "Remove a machine that a or s added from the list.", shown=False),
    )

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        picked = {row.key for row in state.picked}
        return [_machine_row(self.steered, row, row.key in picked) for row in state.listed]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        return [line for row in state.listed if row.key == key for line in self._about(row)]

    def _about(self, row: MachineRow) -> list[Content]:
        lines = cause_lines(row)
        lines += [_path(path) for path in row.paths if not row.here]
        about = ", ".join(filter(None, (row.system, origin_of(row))))
        lines += [muted(about)] if about and not row.here else []
        if row.fingerprint and not row.here:
            lines.append(muted(f"host key {row.fingerprint}"))
        return lines

    def head(self, state: WizardState) -> Content:
        machines = state.machines
        if any(not row.here for row in machines.rows) or not machines.nothing_found:
            heading, advice = [], machines.advice
        else:
            heading = [literal("No other machine found so far.", "$text-warning")]
            advice = (*machines.advice, *machines.nothing_found)
        return Content("\n").join([*heading, *[muted(f"· {line}") for line in advice]])

    def empty(self, state: WizardState) -> Content:
        return muted("Searching for machines: " + ", ".join(state.machines.searched))

    def summary(self, state: WizardState) -> str:
        return f"{len(state.picked)} picked of {len(state.machines.rows)} found"

    def hint(self, state: WizardState) -> Content:
        searched = ", ".join(state.machines.searched)
        if not searched:
            return muted("Searching for machines")
        seconds = state.machines.seconds
        if seconds >= _SEARCHED:
            return muted(f"Still searching; you need not wait. Searched: {searched}")
        return muted(f"Searching for {seconds:.0f} s: {searched}" if seconds >= 1 else f"Searching: {searched}")

    def action_pick(self) -> None:
        if self.table.cursor:
            self.do(actions.pick(self.table.cursor))

    def action_ask_neighbours(self) -> None:
        self.do(ask_neighbours())

    def on_row_table_ticked(self, event: RowTable.Ticked) -> None:
        event.stop()
        self.do(actions.pick(event.row))

    def action_add(self) -> None:
        from distributed.hosts.file import typed_machine  # imports pydantic, which the first paint does without

        about = [
            muted("As you would type it after ssh: studio.local, ada@192.168.1.7,"),
            muted("ada@host:2222, or a name of your ~/.ssh/config."),
        ]
        refusal = refusal_by(typed_machine)
        self.app.push_screen(TextDialog("Add a machine", about, accept="Add", problem_of=refusal), self._added)

    def _added(self, text: str | None) -> None:
        if text is not None:
            self.do(actions.add_machine(text.strip()))
            self._select(f"typed:{' '.join(text.split())}")

    def draw(self) -> None:
        """Draw, keeping the cursor on a machine whose row was merged into the one that answers at its address."""
        previous_key = self.table.cursor if self.ready else ""
        super().draw()
        if previous_key and self.ready and self.table.cursor != previous_key:
            self._select(previous_key)

    def _select(self, key: str) -> None:
        keys = (row.key for row in self.state.machines.rows if key in (row.key, *row.aliases))
        self.table.select(next(keys, ""))

    def action_remove(self) -> None:
        for text in self.state.answers.typed:
            row = next((row for row in self.state.machines.rows if row.key == self.table.cursor), None)
            if row is not None and f"typed:{text}" in (row.key, *row.aliases):
                self.do(actions.remove_machine(text))
                return
        self.notify("only machines that a or s added can be removed; space leaves others out", timeout=3)

    def headless(self) -> str:
        return command_line("machines", "discover", *self.state.answers.typed)


def _machine_row(app: MusterApp, row: MachineRow, picked: bool) -> TableRow:
    box, style = ("[x]", "bold $text-primary") if picked else ("[ ]", "$text-muted")
    location = " (here)" if row.here else ""
    state = StatusMark.ONLINE.show(row.label) if row.status is ItemStatus.OK else shown_state(app, row)
    return TableRow(
        row.key,
        (
            Content.assemble((box, style), " ", literal(row.name, "bold" if picked else ""), (location, "$text-muted")),
            state,
            literal(row.chip),
            literal(row.memory),
            literal(row.system),
            muted(", ".join("you" if origin == "typed" else origin for origin in row.found_by)),
            muted(len(row.paths) or ""),
        ),
    )


def _path(path: FoundPath) -> Content:
    look, endpoint = StatusMark.ONLINE if path.online else StatusMark.OFFLINE, path.endpoint
    interface = endpoint.interface and f"on {endpoint.interface}"
    words = "  ".join(filter(None, (endpoint.host_port, endpoint.kind.value, interface)))
    return Content.assemble((look.symbol + " ", look.style), muted(words))


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
            self._ask_password(row)

    def _to_the_next_need(self) -> None:
        """Select a machine that needs the user, else go to the next step; if a failed one prevents that, select it."""
        included = [row for row in self.state.access if row.key not in self.state.answers.skipped]
        waiting = [row for row in included if row.need is not AccessNeed.NOTHING]
        failed = [row for row in included if row.status is ItemStatus.FAILED]
        if waiting:
            self.table.select(waiting[0].key)
            return
        self.action_next()
        if failed and self.table.cursor not in [row.key for row in failed]:
            self.table.select(failed[0].key)

    def _ask_trust(self, row: Access) -> None:
        def answered(keys_match: bool | None) -> None:
            if keys_match:
                self.do(actions.trust_key(row.key, row.fingerprint))

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
                self.steered.wizard.give_password(row.key, password)

        dialog = TextDialog(f"Password of {row.place or row.name}", about, accept="Install a key", secret=True)
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
