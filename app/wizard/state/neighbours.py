"""Machines of this network that nothing announces: the user has the neighbours asked which of them accept SSH, and
then, after a yes, every address of the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.wizard.state.assessment import THIS_NETWORK, is_address
from app.wizard.state.dependencies import action
from app.wizard.state.records import MachineRow
from app.wizard.state.state import StatePart, TaskKind
from app.wizard.state.state import WizardState as State
from distributed.discovery.sightings import SightingOrigin
from profiles.errors import counted

if TYPE_CHECKING:  # asyncio, which the first paint does without
    from distributed.discovery.neighbours import SshNeighbour


@dataclass(frozen=True)
class NeighbourAnswers:
    """Which of the machines that were asked accept SSH."""

    asked: int
    machines: Sequence[SshNeighbour] = ()
    """Those that accept SSH."""
    networks: tuple[str, ...] = ()
    """Networks of which only machines that this computer has met were asked."""


@action
def ask_neighbours(state: State, networks: tuple[str, ...] = ()) -> State:
    """Ask the machines in this computer's neighbour table which of them accept SSH, and list those; with networks: ask
    all their addresses, to which the user has agreed."""
    if state.is_under_way(TaskKind.NEIGHBOURS):
        return state.noting("machines are being asked already; esc ends that")
    return state.ordering(TaskKind.NEIGHBOURS, inputs=networks)


def unasked_networks(state: State) -> tuple[str, ...]:
    """Return the networks of which every address may be asked, after the machines that this computer has met."""
    answers = state.part(TaskKind.NEIGHBOURS).value
    return answers.networks if isinstance(answers, NeighbourAnswers) else ()


def network_question(networks: Sequence[str]) -> str:
    """Return the question before every address of networks is asked."""
    count = sum(2 ** (32 - int(network.rpartition("/")[2])) - 2 for network in networks)
    return f"Ask all {count} addresses of {' and '.join(networks)} for SSH (once, a second at most each)?"


def with_neighbours(state: State, answers: NeighbourAnswers) -> State:
    """Return the state with the neighbours that accept SSH listed, none of them picked."""
    from distributed.hosts.file import typed_machine  # imports pydantic, which the first paint does without

    known = {row.entry.host for row in state.machines.rows} | {
        path.endpoint.address for row in state.machines.rows for path in row.paths
    }
    new = [machine for machine in answers.machines if machine.address not in {*known, *state.answers.typed}]
    rows = tuple(
        MachineRow(
            f"typed:{machine.address}",
            machine.name or machine.address,
            words="searching",
            entry=typed_machine(machine.address),
            system=machine.system,
            found_by=(THIS_NETWORK,),
        )
        for machine in new
    )
    machines = replace(state.machines, rows=(*state.machines.rows, *rows))
    state = replace(state, pinned=(*state.pinned, *rows), machines=machines)
    state = state.answering(typed=(*state.answers.typed, *(machine.address for machine in new))).putting(
        TaskKind.NEIGHBOURS, state_part=StatePart(answers)
    )
    return state.noting(_notice(answers, len(new)))


def _notice(answers: NeighbourAnswers, new: int) -> str:
    met = "machine that this computer has met" if answers.networks else "address"
    plural = "machines that this computer has met" if answers.networks else "addresses"
    more = counted(new, "more machine accepts SSH", "more machines accept SSH")
    outcome = f"{more}, space picks one" if new else "no other one accepts SSH"
    networks = " and ".join(answers.networks)
    further = f"s again asks all of {networks}" if networks else "a adds one by its address"
    return f"asked {counted(answers.asked, met, plural)}: {outcome}; {further}"


def by_this_network(state: State, rows: Iterable[MachineRow]) -> Iterator[MachineRow]:
    """Yield discovered rows, those of neighbours with the network as their origin: the search takes them for typed.

    The search knows them by address: what they were called and ran when the network was asked takes that place.
    """
    neighbours = {row.key: row for row in state.pinned if THIS_NETWORK in row.found_by}
    for row in rows:
        neighbour = next((neighbours[key] for key in (row.key, *row.aliases) if key in neighbours), None)
        if neighbour is not None:
            origins = (THIS_NETWORK if name == SightingOrigin.TYPED.value else name for name in row.found_by)
            name = neighbour.name if is_address(row.name) else row.name
            row = replace(row, name=name, system=row.system or neighbour.system, found_by=tuple(origins))
        yield row


def is_unnamed(row: MachineRow) -> bool:
    """Whether only the address of a machine of this network is known; its name is, after Access."""
    return THIS_NETWORK in row.found_by and is_address(row.name)
