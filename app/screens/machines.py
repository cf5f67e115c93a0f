"""Machines: the live table of the machines on the network, to select those that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, StepScreen, cause_lines, shown_state
from app.shell.base_app import MusterApp
from app.shell.dialogs import TextDialog
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.row_table import RowTable
from app.shell.text import Mark, literal, muted
from app.wizard import actions
from app.wizard.records import MachineRow
from app.wizard.state import Step, WizardState

if TYPE_CHECKING:  # takes a while to load, which the first screen does without
    from distributed.discovery.machine_identity import FoundPath


class MachinesScreen(StepScreen):
    """Which machines take part?"""

    STEP = Step.MACHINES
    COLUMNS = (
        Column("name", "machine", most=30, least=14),
        Column("state", "state", most=18, least=9),
        Column("chip", "chip or GPU", most=26, least=14, rank=1),
        Column("memory", "memory", right=True, most=9, least=6, rank=2),
        Column("system", "system", most=22, least=12, rank=4),
        Column("found", "found by", most=26, least=12, rank=3),
        Column("paths", "paths", right=True, most=5, least=4, rank=5),
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
        Key("space", "pick", "Pick", "Include the selected machine, or leave it out."),
        Key("a", "add", "Add", "Add a machine that is not listed: user@host, as you would type it after ssh."),
        Key("d,delete", "remove", "Remove", "Remove a machine that you added from the list.", shown=False),
    )

    def rows(self, state: WizardState) -> Sequence[Row]:
        picked = {row.key for row in state.picked}
        return [_row(self.steered, row, row.key in picked) for row in state.machines.rows]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        return [line for row in state.machines.rows if row.key == key for line in self._about(row)]

    def _about(self, row: MachineRow) -> list[Content]:
        lines = cause_lines(row)
        lines += [_path(self.steered, path) for path in row.paths if not row.here]
        found = f"found by {' and '.join(row.found_by)}" if row.found_by else ""
        about = ", ".join(filter(None, (row.system, found)))
        lines += [muted(about)] if about and not row.here else []
        if row.fingerprint and not row.here:
            lines.append(muted(f"host key {row.fingerprint}"))
        return lines

    def head(self, state: WizardState) -> Content:
        if not state.machines.advice:
            return Content("")
        dash = "- " if self.steered.ascii_only else "· "
        others = any(not row.here for row in state.machines.rows)
        first = [] if others else [literal("No other machine found so far.", "$text-warning")]
        return Content("\n").join([*first, *[muted(dash + line) for line in state.machines.advice]])

    def empty(self, state: WizardState) -> Content:
        return muted("Searching for machines: " + ", ".join(state.machines.searched))

    def summary(self, state: WizardState) -> str:
        return f"{len(state.picked)} picked of {len(state.machines.rows)} found"

    def hint(self, state: WizardState) -> Content:
        searched = ", ".join(state.machines.searched)
        seconds = f" for {state.machines.seconds:.0f} s" if state.machines.seconds >= 1 else ""
        return muted(f"Searching{seconds}: {searched}" if searched else "Searching for machines")

    def action_pick(self) -> None:
        if self.table.cursor:
            self.do(actions.pick(self.table.cursor))

    def on_row_table_ticked(self, event: RowTable.Ticked) -> None:
        event.stop()
        self.do(actions.pick(event.row))

    def action_add(self) -> None:
        about = [
            muted("As you would type it after ssh: studio.local, ada@192.168.1.7,"),
            muted("ada@host:2222, or a name of your ~/.ssh/config."),
        ]
        self.app.push_screen(TextDialog("Add a machine", about, accept="Add"), self._added)

    def _added(self, text: str | None) -> None:
        if text and text.strip():
            self.do(actions.add_machine(text.strip()))
            added = next((row.key for row in self.state.machines.rows if text.strip() in row.key), "")
            self.table.select(added)

    def action_remove(self) -> None:
        for text in self.state.answers.typed:
            row = next((row for row in self.state.machines.rows if row.key == self.table.cursor), None)
            if row is not None and f"typed:{text}" in (row.key, *row.aliases):
                self.do(actions.remove_machine(text))
                return
        self.notify("only machines that you added can be removed; space leaves others out", timeout=3)

    def headless(self) -> str:
        return command_line("discover", *self.state.answers.typed)


def _row(app: MusterApp, row: MachineRow, picked: bool) -> Row:
    box, style = ("[x]", "bold $text-primary") if picked else ("[ ]", "$text-muted")
    here = " (here)" if row.here else ""
    online = app.symbol(Mark.ONLINE) if row.status.value == "ok" else ""
    state = literal(f"{online} {row.label}", Mark.ONLINE.style) if online else shown_state(app, row)
    return Row(
        row.key,
        (
            Content.assemble((box, style), " ", literal(row.name, "bold" if picked else ""), (here, "$text-muted")),
            state,
            literal(row.chip),
            literal(row.memory),
            literal(row.system),
            muted(", ".join(row.found_by)),
            muted(len(row.paths) or ""),
        ),
    )


def _path(app: MusterApp, path: FoundPath) -> Content:
    look, way = Mark.ONLINE if path.online else Mark.OFFLINE, path.endpoint
    words = "  ".join(filter(None, (way.where, way.kind.value, way.interface and f"on {way.interface}")))
    return Content.assemble((app.symbol(look) + " ", look.style), muted(words))
