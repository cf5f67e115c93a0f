"""Machines of this network that nothing announces: the user has the neighbours asked which of them accept SSH."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.wizard.state.dependencies import action
from app.wizard.state.records import MachineRow
from app.wizard.state.state import TaskKind
from app.wizard.state.state import WizardState as State
from profiles.errors import counted


@action
def ask_neighbours(state: State) -> State:
    """Ask the machines in this computer's neighbour table which of them accept SSH, and list those."""
    return state if state.is_under_way(TaskKind.NEIGHBOURS) else state.ordering(TaskKind.NEIGHBOURS)


def with_neighbours(state: State, addresses: Sequence[str]) -> State:
    """Return the state with the neighbours at these addresses listed, none of them picked."""
    from distributed.hosts.file import typed_machine  # imports pydantic, which the first paint does without

    known = {row.entry.host for row in state.machines.rows} | {
        path.endpoint.address for row in state.machines.rows for path in row.paths
    }
    new = [address for address in addresses if address not in {*known, *state.answers.typed}]
    rows = tuple(
        MachineRow(f"typed:{address}", address, words="searching", entry=typed_machine(address), found_by=("typed",))
        for address in new
    )
    machines = replace(state.machines, rows=(*state.machines.rows, *rows))
    state = replace(state, pinned=(*state.pinned, *rows), machines=machines)
    more = counted(len(new), "more machine on this network accepts SSH", "more machines on this network accept SSH")
    none = "no other machine that this computer has met on its networks accepts SSH; start the SSH server there"
    return state.answering(typed=(*state.answers.typed, *new)).noting(f"{more}: space picks one" if new else none)
