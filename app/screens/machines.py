"""Machines: selecting machines on the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.dialogs.share_dialog import ShareDialog
from app.screens.network_map import ways_from_here
from app.screens.step_screen import GO_ON, NEXT, StepScreen, cause_lines, shown_state
from app.shell.base_app import MusterApp
from app.shell.dialogs import QuestionDialog, TextDialog, refusal_by
from app.shell.keys import Key
from app.shell.row_table import RowTable
from app.shell.text import StatusMark, TableColumn, TableRow, literal, muted
from app.wizard.state import actions
from app.wizard.state.neighbours import ask_neighbours, is_unnamed, network_question, unasked_networks
from app.wizard.state.observations import origin_of
from app.wizard.state.records import ItemStatus, MachineRow
from app.wizard.state.state import Step, TaskKind, WizardState
from profiles.quantities import span_text

if TYPE_CHECKING:  # takes a while to load, which the first screen does without
    from distributed.discovery.machine_identity import FoundPath

_SEARCHED = 10.0
"""Seconds after which a search seldom finds more."""


class MachinesScreen(StepScreen):
    """Which machines take part?"""

    STEP = Step.MACHINES
    COLUMNS = (
        TableColumn("name", "machine", max_width=36, min_width=14),
        TableColumn("state", "state", max_width=18, min_width=15),
        TableColumn("chip", "chip or GPU", max_width=26, min_width=14, rank=1),
        TableColumn("memory", "memory", right=True, max_width=9, min_width=6, rank=2),
        TableColumn("system", "system", max_width=22, min_width=12, rank=4),
        TableColumn("found", "found by", max_width=26, min_width=12, rank=3),
        TableColumn("paths", "paths", right=True, max_width=5, min_width=4, rank=5),
    )
    HELP = (
        "Machines appear as they are found: those that announce themselves (a Mac with Remote Login on does), those in "
        "your SSH configuration and hosts file, those that let Muster in before, and those you add. Each machine is "
        "one row, however many names, addresses and cables it has: its SSH host key identifies it.\n"
        "Machine missing? On a Mac: System Settings > General > Sharing > Remote Login. On Linux: install and start "
        "openssh-server. Or add it with 'a'. A machine without SSH server, or that nobody can dial, joins with a code "
        "('c')."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("space", "pick", "Pick", "Include the selected machine, or leave it out."),
        Key("a", "add", "Add", "Add a machine that is not listed: user@host, as you would type it after ssh."),
        Key("s", "ask_neighbours", "Ask", "Ask machines this computer has met for SSH; again: its whole network."),
        Key("c", "share", "Code", "Show a code with which a machine joins that has no SSH server, or accepts nobody."),
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

    def preview(self, state: WizardState) -> Sequence[Content]:
        if measured := self.map_lines(state):
            return [muted("The links between them, as measured."), *measured]
        return ways_from_here(state, *self.app.size, self.steered.ascii_only)

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
        return muted(
            f"Searching for {span_text(round(seconds))}: {searched}" if seconds >= 1 else f"Searching: {searched}"
        )

    def action_pick(self) -> None:
        if self.table.cursor:
            self.do(actions.pick(self.table.cursor))

    def awaited_by(self, key: str) -> str:
        """A second ``s`` waits for the answers to the first, as it asks about their networks; Enter for a machine."""
        if key in ("enter", "n") and not self.state.machines.rows and self.state.machines.seconds < _SEARCHED:
            return "machines are being searched for"
        asked = (task for task, _ in self.state.under_way if task.kind is TaskKind.NEIGHBOURS)
        return "machines are being asked" if key == "s" and any(not task.inputs for task in asked) else ""

    def action_ask_neighbours(self) -> None:
        networks = unasked_networks(self.state)
        if not networks:
            self.do(ask_neighbours())
            return

        def answered(agreed: bool | None) -> None:
            self.do(ask_neighbours(networks if agreed else ()))

        self.app.push_screen(QuestionDialog(network_question(networks), "Ask all", "Only those met"), answered)

    def action_back(self) -> None:
        """End the asking of addresses, else go back."""
        if self.state.is_under_way(TaskKind.NEIGHBOURS):
            self.steered.wizard.end_asking()
        else:
            super().action_back()

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
        if text is None:
            return
        self.do(actions.add_machine(text.strip()))
        row = actions.row_named(self.state, text)
        self._select(row.key if row is not None else "")

    def action_share(self) -> None:
        self.app.push_screen(ShareDialog(self.steered.wizard.share), self._joined)

    def _joined(self, name: str | None) -> None:
        from distributed.hosts.joined import SUFFIX  # loads what the first paint does without

        self._added(f"{name}{SUFFIX}" if name else None)

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
            muted("its name: after Access") if is_unnamed(row) and not row.chip else literal(row.chip),
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
