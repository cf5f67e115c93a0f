"""Machines of this network that nothing announces: the user has the neighbours asked which of them accept SSH."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from app.wizard.state.dependencies import action
from app.wizard.state.records import MachineRow
from app.wizard.state.state import TaskKind
from app.wizard.state.state import WizardState as State
from distributed.discovery.sightings import SightingOrigin
from profiles.errors import counted

THIS_NETWORK = "this network"
"""Origin of a machine that answered when its network was asked, in place of its being typed."""


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
        MachineRow(
            f"typed:{address}", address, words="searching", entry=typed_machine(address), found_by=(THIS_NETWORK,)
        )
        for address in new
    )
    machines = replace(state.machines, rows=(*state.machines.rows, *rows))
    state = replace(state, pinned=(*state.pinned, *rows), machines=machines)
    more = counted(len(new), "more machine on this network accepts SSH", "more machines on this network accept SSH")
    none = "no other machine that this computer has met on its networks accepts SSH; start the SSH server there"
    return state.answering(typed=(*state.answers.typed, *new)).noting(f"{more}: space picks one" if new else none)


def by_this_network(state: State, rows: Iterable[MachineRow]) -> Iterator[MachineRow]:
    """Yield discovered rows, those of neighbours with the network as their origin: the search takes them for typed."""
    neighbours = {row.key for row in state.pinned if THIS_NETWORK in row.found_by}
    for row in rows:
        if not neighbours.isdisjoint((row.key, *row.aliases)):
            origins = (THIS_NETWORK if name == SightingOrigin.TYPED.value else name for name in row.found_by)
            row = replace(row, found_by=tuple(origins))
        yield row
