"""The step at which a resumed run goes on: the newest of which all members that trained then have a snapshot, or the
newest of any member where the snapshots of all hold the same.

A member that left or was lost has no snapshot of the steps that the others made without it: it receives the joining
state from one of them. If no step is complete, because a disk is gone, the newest step of any member is taken.

Members that lost one another while they exchanged may have snapshots of one step of which only some hold the result of
the last round. The others continue from the state of one that holds it.

A machine that was away while the run went on from an earlier step may have snapshots of an abandoned attempt. Every
snapshot records the attempts that led to it; only those that led to the newest attempt count.

A member of several devices has a snapshot where each of the devices that wrote it has left its part: these may be more,
or fewer, than it has now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from profiles.errors import BadInput, NothingToResume
from training.data.balance import reports_held
from training.exchange.base import Exchange, JoiningState
from training.exchange.mean.broadcast import broadcast
from training.exchange.payloads import state_from_bytes, state_to_bytes
from training.layouts.base import Layout
from training.layouts.whole import WholeModel
from training.loop.position import MOST_ATTEMPTS
from training.records.bounded_fields import Count, Rank, Step, Text
from training.snapshots.member_snapshots import MemberSnapshots, Origin, SnapshotParts
from training.snapshots.part_transfer import bring_parts
from training.snapshots.snapshot_store import OTHER_SETTINGS, Snapshot, SnapshotStore

_STATE = "resume/state"
"""Name of the broadcast, in which all members take part."""


class HeldSnapshots(BaseModel):
    """The snapshots that a member holds."""

    live: dict[Step, list[Rank]] = {}
    """Ranks that trained when each sound snapshot was written, by step."""
    courses: dict[Step, Annotated[list[tuple[Count, Step]], Field(max_length=MOST_ATTEMPTS)]] = {}
    """Attempts that led to each snapshot, with the steps at which they began, by step."""
    rounds: dict[Step, Count] = {}
    """Results of the strategy's rounds, and reports of speeds, that each snapshot holds, by step."""
    parts: dict[Step, tuple[Count, Count]] = {}
    """Which part of the member's model each snapshot holds, from 0, and of how many, by step."""
    folder: Text = ""
    """Of the store."""
    unsound: list[Step] = []
    """Steps of the damaged snapshots in it."""
    lacking: dict[Step, Text] = {}
    """What is missing of each snapshot of which not all parts are there, in words, by step."""
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
            rounds={
                step: rounds_held(state["strategy"]) + reports_held(state)
                for step, state in states.items()
                if "strategy" in state
            },
            parts={step: state.get("part", (0, 1)) for step, state in states.items()},
            folder=str(store.directory),
            unsound=[step for step in store.steps() if step not in steps] if problems else [],
            damaged=problems,
            foreign=list(foreign.values()),
        )

    def origin(self, step: int) -> Origin:
        """Return what the parts of the snapshot of ``step`` have in common."""
        return Origin(self.parts[step][1], tuple(self.courses[step]))

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
    parts: SnapshotParts | None
    """Of this member's snapshot, if it is a holder."""

    @property
    def all_have_it(self) -> bool:
        return self.holders == self.members


def agree_on_snapshot(
    stores: Sequence[SnapshotStore],
    exchange: Exchange,
    warn: Callable[[str], None],
    plan_hash: str,
    names: Callable[[int], str] = "member {}".format,
    alike: bool = False,
    absent: Iterable[str] = (),
    rounds_held: Callable[[Mapping[str, Any]], int] = lambda state: 0,
    layout: Layout | None = None,
) -> Agreed:
    """Return the step to go on at.

    Args:
        stores: the parts of this member's snapshots that this process checks.
        plan_hash: of the run; snapshots of other plans do not count.
        alike: whether the snapshots of all members hold the same.
        absent: names of absent members.
        rounds_held: how many rounds' results a snapshot's state of the strategy holds.
        layout: of the member's devices, which are asked, as each holds a part only; ``None``: there is one.

    Raises:
        BadInput: no member has a sound snapshot.
    """
    layout = layout or WholeModel()
    checked = [HeldSnapshots.of(store, plan_hash, rounds_held) for store in stores]
    for held_here in checked:
        for problem in (*held_here.damaged, *held_here.foreign):
            warn(f"{problem}; it is skipped")
    snapshots, parts_at = _held_by_member(_PARTS.dump_json(checked), layout)
    answers = exchange.gather("resume/steps", snapshots.model_dump_json().encode())
    gathered = {rank: _read(payload) for rank, payload in sorted(answers.items())}
    newest = max((course for snapshots in gathered.values() for course in snapshots.courses.values() if course),
                 key=lambda course: course[-1], default=[])  # fmt: skip
    held = {rank: snapshots.on(newest) for rank, snapshots in gathered.items()}
    holders = {step: {rank for rank in held if step in held[rank]} for theirs in held.values() for step in theirs}
    if not holders:
        raise _nothing_to_resume(gathered.values(), [*absent])
    complete = [s for s, ranks in holders.items() if any(held[rank][s] & set(held) <= ranks for rank in ranks)]
    step = max(holders if alike else complete or holders)
    rounds = {rank: gathered[rank].rounds.get(step, 0) for rank in holders[step]}
    newest_holders = sorted(rank for rank in rounds if rounds[rank] == max(rounds.values()))
    is_holder = exchange.rank in newest_holders
    parts = parts_at[step] if is_holder else None
    for newer, missing in sorted(snapshots.lacking.items()):
        if newer > step and layout.part[0] == 0:
            warn(f"the snapshot of step {newer} is skipped: {missing}")
    agreed = Agreed(step, tuple(newest_holders), tuple(held), parts)
    if exchange.rank == agreed.holders[0]:
        without = [rank for rank in agreed.members if rank not in agreed.holders]
        for lack, ranks in (("snapshot", set(without) - set(rounds)), ("last exchange", set(without) & set(rounds))):
            if ranks:
                lacking, source = ", ".join(map(names, sorted(ranks))), names(exchange.rank)
                has, continues = ("has", "continues") if len(ranks) == 1 else ("have", "continue")
                warn(f"{lacking} {has} no {lack} of step {step} and {continues} with the state of {source}")
    return agreed


_PARTS = TypeAdapter(list[HeldSnapshots])


def _held_by_member(checked: bytes, layout: Layout) -> tuple[HeldSnapshots, dict[int, SnapshotParts]]:
    """Return the snapshots of which all parts are there, what is wrong with others, and where the parts are, by step.

    Args:
        checked: what this process has of the parts, as ``_PARTS`` writes it.
    """
    answers = [(device, part) for device, told in enumerate(layout.gather(checked))
               for part in _PARTS.validate_json(told)]  # fmt: skip
    held = [part for _, part in answers]
    by_origin: dict[tuple[int, Origin], dict[int, list[tuple[int, HeldSnapshots]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for device, part in answers:
        for step, (number, _) in part.parts.items():
            by_origin[step, part.origin(step)][number].append((device, part))
    in_order = sorted(by_origin.items(), key=lambda item: item[0][1].course)
    missing = {key: {*range(key[1].parts)} - parts.keys() for key, parts in in_order}
    whole = {step: (origin, parts) for (step, origin), parts in in_order if not missing[step, origin]}
    complete = {step: parts[0][0][1] for step, (_, parts) in whole.items()}
    newest = max((origin.course[-1:] for _, origin in by_origin), default=())  # others were given up
    snapshots = HeldSnapshots(
        live={step: part.live[step] for step, part in complete.items()},
        courses={step: part.courses[step] for step, part in complete.items()},
        rounds={step: part.rounds[step] for step, part in complete.items() if step in part.rounds},
        parts={step: part.parts[step] for step, part in complete.items()},
        lacking={step: _missing_in_words(numbers, origin, layout.names) for (step, origin), numbers in missing.items()
                 if numbers and step not in whole and origin.course[-1:] == newest},
        damaged=[problem for part in held for problem in part.damaged],
        foreign=[problem for part in held for problem in part.foreign],
    )  # fmt: skip
    damaged = defaultdict[int, dict[int, list[str]]](lambda: defaultdict(list))
    for device, part in answers:
        for step in part.unsound:
            damaged[step][device].append(part.folder)
    return snapshots, {
        step: SnapshotParts(step, origin, _holders(parts), damaged[step]) for step, (origin, parts) in whole.items()
    }


def _holders(parts: Mapping[int, Sequence[tuple[int, HeldSnapshots]]]) -> dict[int, list[int]]:
    return {number: sorted({device for device, _ in copies}) for number, copies in parts.items()}


def _missing_in_words(numbers: Collection[int], origin: Origin, names: Sequence[str]) -> str:
    """Return which parts of a snapshot no machine has, with the devices that wrote them if they take part again."""
    is_as_written = len(names) == origin.parts
    parts = [f"part {number + 1}" + (f" ({names[number]})" if is_as_written else "") for number in sorted(numbers)]
    verb = "is" if len(parts) == 1 else "are"
    return f"{', '.join(parts)} of {origin.parts} {verb} missing, or damaged, on all machines"


def _read(payload: bytes) -> HeldSnapshots:
    """Read a member's answer; an invalid one counts as no snapshots."""
    try:
        return HeldSnapshots.model_validate_json(payload)
    except ValidationError:
        return HeldSnapshots()


def _nothing_to_resume(gathered: Collection[HeldSnapshots], absent: Collection[str]) -> BadInput:
    damaged = [problem for snapshots in gathered for problem in snapshots.damaged]
    foreign = [problem for snapshots in gathered for problem in snapshots.foreign]
    lacking = [f"of step {step} {words}" for snapshots in gathered for step, words in sorted(snapshots.lacking.items())]
    if absent:
        problems = lacking[-1:] + damaged + foreign
        names, why = ", ".join(absent), f" ({problems[0]})" if problems else ""
        message = f"no machine that is there has a sound snapshot{why}"
        return BadInput(message, f"switch {names} on and resume again: it may have one")
    if lacking:
        message = "; ".join((f"no snapshot is whole: {lacking[-1]}", *damaged[:1]))
        return NothingToResume(message, "bring the missing files back and resume again, or start a new run instead")
    if foreign and not damaged:
        return BadInput(foreign[0], OTHER_SETTINGS)
    if not damaged:
        return NothingToResume("no machine has a snapshot: there is nothing to resume")
    number = f"all {len(damaged)} snapshots of this run are" if len(damaged) > 1 else "the only snapshot of this run is"
    hint = "start a new run instead; the damaged files are left as they are"
    return NothingToResume(f"{number} damaged: {damaged[0]}", hint)


def load_agreed(
    agreed: Agreed,
    snapshots: MemberSnapshots,
    layout: Layout,
    is_wanted: Callable[[str], bool],
    warn: Callable[[str], None],
) -> Snapshot:
    """Return what a device needs of the agreed snapshot; parts that its machine lacks come from the member's others.

    Args:
        is_wanted: whether the device needs a tensor.

    Raises:
        ExchangeError: a device is lost.
        RunFailed: a part cannot be read or written.
    """
    assert agreed.parts is not None  # else the member takes the state of another
    snapshots.note_damaged(agreed.parts)
    bring_parts(snapshots, layout.carrier, layout.gather, agreed.parts, is_wanted, warn)
    return snapshots.load(agreed.step, snapshots.plan_hash, agreed.parts.origin, is_wanted, layout.rows)


def hand_over(agreed: Agreed, exchange: Exchange, make_state: Callable[[], JoiningState]) -> None:
    """Send the loaded snapshot to the members that do not have it, if there are any; called by those that have it."""
    if not agreed.all_have_it:
        source = agreed.holders[0]
        broadcast(exchange, _STATE, state_to_bytes(make_state()) if exchange.rank == source else b"", source)


def take_over(agreed: Agreed, exchange: Exchange) -> JoiningState:
    """Return the state of the lowest rank that has the snapshot; called by those that do not."""
    return state_from_bytes(broadcast(exchange, _STATE, b"", agreed.holders[0]))
