"""The step at which a resumed run goes on: the newest of which all members that trained then have a snapshot, or the
newest of any member where the snapshots of all hold the same.

A member that left or was lost has no snapshot of the steps that the others made without it: it receives the joining
state from one of them. If no step is complete, because a disk is gone, the newest step of any member is taken.

Members that lost one another while they exchanged may have snapshots of one step of which only some hold the result of
the last round. The others continue from the state of one that holds it.

A machine that was away while the run went on from an earlier step may have snapshots of an abandoned attempt. Every
snapshot records the attempts that led to it; only those that led to the newest attempt count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from profiles.errors import BadInput
from training.exchange.base import Exchange, JoiningState
from training.exchange.mean.broadcast import broadcast
from training.exchange.payloads import state_from_bytes, state_to_bytes
from training.loop.position import MOST_ATTEMPTS
from training.records.bounded_fields import Count, Rank, Step, Text
from training.run.outcome import NOT_THIS_RUN
from training.snapshots.snapshot_store import OTHER_SETTINGS, SnapshotStore

_STATE = "resume/state"
"""Name of the broadcast, in which all members take part."""


class HeldSnapshots(BaseModel):
    """The snapshots that a member holds."""

    live: dict[Step, list[Rank]] = {}
    """Ranks that trained when each sound snapshot was written, by step."""
    courses: dict[Step, Annotated[list[tuple[Count, Step]], Field(max_length=MOST_ATTEMPTS)]] = {}
    """Attempts that led to each snapshot, with the steps at which they began, by step."""
    rounds: dict[Step, Count] = {}
    """Results of the strategy's rounds that each snapshot holds, by step."""
    damaged: list[Text] = []
    foreign: list[Text] = []
    """A line about each snapshot that was made with another plan."""

    @classmethod
    def of(cls, store: SnapshotStore, plan_hash: str, rounds_held: Callable[[Mapping[str, Any]], int]) -> HeldSnapshots:
        steps, problems = store.verified_steps()
        foreign = store.foreign(steps, plan_hash)
        states = {step: store.state(step) for step in steps if step not in foreign}
        return cls(
            live={step: state.get("live", []) for step, state in states.items()},
            courses={step: state.get("course", []) for step, state in states.items()},
            rounds={step: rounds_held(state["strategy"]) for step, state in states.items() if "strategy" in state},
            damaged=problems,
            foreign=list(foreign.values()),
        )

    def on(self, newest: list[tuple[int, int]]) -> dict[int, set[int]]:
        """Return the ranks that trained at each snapshot that led to the attempts ``newest``, by step."""
        attempts = {step: course[-1][0] if course else 0 for step, course in self.courses.items()}
        given_up = {s for s in self.live for attempt, begun in newest if attempt > attempts.get(s, 0) and begun < s}
        return {step: set(live) for step, live in self.live.items() if step not in given_up}


@dataclass(frozen=True)
class Agreed:
    """The step at which the group goes on."""

    step: int
    holders: tuple[int, ...]
    """Ranks that have the snapshot of this step, with the results of all rounds that any of them has."""
    members: tuple[int, ...]

    @property
    def all_have_it(self) -> bool:
        return self.holders == self.members


def agree_on_snapshot(
    store: SnapshotStore,
    exchange: Exchange,
    warn: Callable[[str], None],
    plan_hash: str,
    names: Callable[[int], str] = "member {}".format,
    alike: bool = False,
    absent: Collection[str] = (),
    rounds_held: Callable[[Mapping[str, Any]], int] = lambda state: 0,
    gather: Callable[[bytes], list[bytes]] = lambda payload: [payload],
) -> Agreed:
    """Return the step to go on at.

    Args:
        plan_hash: of the run; snapshots of other plans do not count.
        alike: whether the snapshots of all members hold the same.
        absent: names of absent members.
        rounds_held: how many rounds' results a snapshot's state of the strategy holds.
        gather: asks the member's devices, see :meth:`training.layouts.base.Layout.gather`: each holds a part only.

    Raises:
        BadInput: no member has a sound snapshot.
    """
    snapshots = _held_by_all_devices(HeldSnapshots.of(store, plan_hash, rounds_held), gather)
    for problem in (*snapshots.damaged, *snapshots.foreign):
        warn(f"{problem}; it is skipped")
    answers = exchange.gather("resume/steps", snapshots.model_dump_json().encode())
    gathered = {rank: _read(payload) for rank, payload in sorted(answers.items())}
    newest = max((course for snapshots in gathered.values() for course in snapshots.courses.values() if course),
                 key=lambda course: course[-1], default=[])  # fmt: skip
    held = {rank: snapshots.on(newest) for rank, snapshots in gathered.items()}
    holders = {step: {rank for rank in held if step in held[rank]} for theirs in held.values() for step in theirs}
    if not holders:
        raise _nothing_to_resume(gathered.values(), absent)
    complete = [s for s, ranks in holders.items() if any(held[rank][s] & set(held) <= ranks for rank in ranks)]
    step = max(holders if alike else complete or holders)
    rounds = {rank: gathered[rank].rounds.get(step, 0) for rank in holders[step]}
    agreed = Agreed(step, tuple(sorted(r for r in rounds if rounds[r] == max(rounds.values()))), tuple(held))
    if exchange.rank == agreed.holders[0]:
        without = [rank for rank in agreed.members if rank not in agreed.holders]
        for lack, ranks in (("snapshot", set(without) - set(rounds)), ("last exchange", set(without) & set(rounds))):
            if ranks:
                lacking, source = ", ".join(map(names, sorted(ranks))), names(exchange.rank)
                warn(f"{lacking} has no {lack} of step {step} and continues with the state of {source}")
    return agreed


def _held_by_all_devices(snapshots: HeldSnapshots, gather: Callable[[bytes], list[bytes]]) -> HeldSnapshots:
    """Return the snapshots of which each device of the member has its part, and what is wrong with those of any."""
    held = [_read(payload) for payload in gather(snapshots.model_dump_json().encode())]
    courses = ({(step, tuple(part.courses.get(step, ()))) for step in part.live} for part in held)
    update = {
        "live": {step: snapshots.live[step] for step, _ in set.intersection(*courses)},
        "damaged": [problem for part in held for problem in part.damaged],
        "foreign": [problem for part in held for problem in part.foreign],
    }
    return snapshots.model_copy(update=update)


def _read(payload: bytes) -> HeldSnapshots:
    """Read a member's answer; an invalid one counts as no snapshots."""
    try:
        return HeldSnapshots.model_validate_json(payload)
    except ValidationError:
        return HeldSnapshots()


def _nothing_to_resume(gathered: Collection[HeldSnapshots], absent: Collection[str]) -> BadInput:
    damaged = [problem for snapshots in gathered for problem in snapshots.damaged]
    foreign = [problem for snapshots in gathered for problem in snapshots.foreign]
    if absent:
        problems = damaged + foreign
        names, why = ", ".join(absent), f" ({problems[0]})" if problems else ""
        message = f"no machine that is there has a sound snapshot{why}"
        return BadInput(message, f"switch {names} on and resume again: it may have one")
    if foreign and not damaged:
        return BadInput(foreign[0], OTHER_SETTINGS)
    if not damaged:
        return BadInput("no machine has a snapshot: there is nothing to resume", NOT_THIS_RUN)
    number = f"all {len(damaged)} snapshots of this run are" if len(damaged) > 1 else "the only snapshot of this run is"
    return BadInput(f"{number} damaged: {damaged[0]}", f"{NOT_THIS_RUN}; the damaged files are left as they are")


def hand_over(agreed: Agreed, exchange: Exchange, make_state: Callable[[], JoiningState]) -> None:
    """Send the loaded snapshot to the members that do not have it, if there are any; called by those that have it."""
    if not agreed.all_have_it:
        source = agreed.holders[0]
        broadcast(exchange, _STATE, state_to_bytes(make_state()) if exchange.rank == source else b"", source)


def take_over(agreed: Agreed, exchange: Exchange) -> JoiningState:
    """Return the state of the lowest rank that has the snapshot; called by those that do not."""
    return state_from_bytes(broadcast(exchange, _STATE, b"", agreed.holders[0]))
