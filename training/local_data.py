"""Members that train on data of their own, which stay on their machines: the option ``local_data``.

Nobody knows beforehand how many samples the others have, so they say it before the first step, and a newcomer when it
comes. That is all they say of their data: neither samples nor hashes of them leave a machine.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from profiles.errors import BadInput, counted
from training.bounded import Count
from training.data import Cursor, SampleSchedule, evaluation_slice
from training.exchange.base import Exchange, JoiningState
from training.plan import RunPlan
from training.same_data import BROUGHT_BACK
from training.split import Schedule, SplitSchedule, schedule_of, stream_seed
from training.tasks.base import Task

Sizes = dict[str, int]
"""Samples by split, ``train`` among them."""
_SIZES = TypeAdapter(Annotated[dict[str, Count], Field(max_length=8)])
_STATE = TypeAdapter(dict[int, dict[str, Count]])


def schedule_for(plan: RunPlan, task: Task, rank: int, exchange: Exchange) -> Schedule:
    """Return who trains on which samples, as a plan says and, where data stay on machines, the members say.

    Raises:
        BadInput: there are no samples, or none can be split in this way.
    """
    stays = plan.profile.data.local_data and plan.world_size > 1
    return LocalSchedule(plan, task, rank, exchange) if stays else schedule_of(plan, task)


class LocalSchedule(SplitSchedule):
    """Members that train on the data of their machines.

    Members of one machine that read one path share its data, as members share all of them otherwise; every other one
    holds a part of its own. Each part has an order of its own and begins anew when it is through. An epoch is over when
    as many samples were taken as all members' data hold together: on average each has been through its own then. Every
    sample of a step has the same weight, so who contributes more samples to it counts more.

    Args:
        plan: of the run.
        task: prepared, with the data of this member.
        rank: this member.
        exchange: over which the sizes are told; the same call on all members.

    Raises:
        BadInput: there are no samples, or others than the run began with.
    """

    def __init__(self, plan: RunPlan, task: Task, rank: int, exchange: Exchange) -> None:
        super().__init__([], [], task.lengths())
        self._order, self._task, self._rank = plan.profile.training, task, rank
        self._name = plan.seats[rank].name
        self._drop_last = self._order.drop_last
        self._sizes: dict[int, Sizes] = {}
        """What all members know, by part."""
        self._steps = 0
        self._parts: list[int] = []
        """By rank."""
        self._held: frozenset[int] = frozenset()
        self.arrived: JoiningState | None = None
        """What a newcomer is handed; it has to know the sizes before it can build anything on them."""
        self._grow(plan)
        own = {"train": len(task.train), **{split: len(data) for split, data in task.evaluation.items()}}
        self._own = own
        if exchange.is_newcomer:
            self.arrived = exchange.fetch_state()
            self._take_over(self.arrived.state["holdings"])
        else:
            self._agree(exchange, "start/sizes")
        self._note(self._parts[rank], own)
        self._held = frozenset(self._parts[member.rank] for member in plan.members)

    # ------------------------------------------------------------------------------------------------ who has how much

    def state(self) -> dict[str, Any]:
        """Return what a newcomer has to know."""
        return {"sizes": {str(part): sizes for part, sizes in self._sizes.items()}, "steps": self._steps}

    def follow(self, plan: RunPlan, live: Sequence[int], exchange: Exchange, step: int) -> Iterator[str]:
        """Note who takes part after ``step``; whoever is new says what it has. The same call on all members.

        Yields:
            A line on data that are gone or back.
        """
        self._grow(plan)
        if any(self._parts[rank] not in self._sizes for rank in live):
            self._agree(exchange, f"sizes/{step}")
        held = frozenset(self._parts[rank] for rank in live)
        for part in sorted(self._held ^ held):
            name = next(seat.machine or seat.name for seat in plan.seats if self._parts[seat.rank] == part)
            samples = counted(self._sizes.get(part, {}).get("train", 0), "training sample")
            if part in held:
                yield f"the {samples} of {name} are trained on from here on"
            else:
                yield f"the {samples} of {name} stay on it: they are not trained on until it is back"
        self._held = held

    @property
    def splits(self) -> list[str]:
        """The evaluation splits that any member has."""
        named = dict.fromkeys(split for part in sorted(self._sizes) for split in self._sizes[part])
        return [split for split in named if split != "train"]

    def shares(self, split: str, members: Mapping[int, int]) -> dict[int, range]:
        """Return which samples of its own each member evaluates: members that share data divide them.

        Args:
            members: batch sizes by rank.
        """
        found = {}
        for part, holders in self._holders(members).items():
            size = self._sizes.get(part, {}).get(split, 0)
            found.update({rank: evaluation_slice(size, holders, rank) for rank in holders})
        return dict(sorted(found.items()))

    def _grow(self, plan: RunPlan) -> None:
        """Number the parts of all seats; those of earlier ones stay."""
        alone = self._task.by_rank
        keys = [(seat.machine, seat.data, seat.rank if alone else 0) for seat in plan.seats]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self._parts = [numbers[key] for key in keys]
        self._blocks = [0] * len(numbers)
        for seat in plan.seats:
            self._blocks[self._parts[seat.rank]] += seat.batch_size if seat.rank < plan.world_size else 0
        for seat in plan.added:
            self._blocks[self._parts[seat.rank]] = self._blocks[self._parts[seat.rank]] or seat.batch_size

    def _agree(self, exchange: Exchange, name: str) -> None:
        gathered = exchange.gather(name, json.dumps(self._own).encode())
        for rank, said in sorted(gathered.items()):
            if self._parts[rank] not in self._sizes:
                try:
                    self._sizes[self._parts[rank]] = _SIZES.validate_json(said)
                except ValidationError:
                    continue  # it counts as one that has nothing, until it says more
            if rank == self._rank and self._sizes[self._parts[rank]] != self._own:
                raise self._changed()
        for part, sizes in self._sizes.items():
            self._note(part, sizes)

    def _take_over(self, state: Any) -> None:
        self._sizes, self._steps = _STATE.validate_python(state["sizes"]), int(state["steps"])
        if self._sizes.get(self._parts[self._rank], self._own) != self._own:
            raise self._changed()
        for part, sizes in self._sizes.items():
            self._note(part, sizes)

    def _changed(self) -> BadInput:
        message = f"{self._name} has other data than it began with, or than another worker of its machine"
        return BadInput(message, BROUGHT_BACK)

    def _note(self, part: int, sizes: Sizes) -> None:
        """Make the order of a part; only who holds it needs to know how long its samples are."""
        if part not in self._streams and sizes.get("train", 0):
            order, own = self._order, part == self._parts[self._rank]
            block = order.gradient_accumulation * self._blocks[part]
            seed, lengths = stream_seed(order.seed, part), self._lengths if own else None
            self._streams[part] = SampleSchedule(
                sizes["train"], seed, order.gradient_accumulation, order.drop_last, lengths, block
            )

    # ------------------------------------------------------------------------------------------------ epochs of all

    fingerprint = ""

    def total_steps(self, batch_sizes: Mapping[int, int], epochs: float) -> int:
        """Return the steps until so many samples were taken as ``epochs`` times all that there are; a newcomer takes
        over what the others have worked out."""
        if not self._steps:
            held = [(self._streams[part], holders) for part, holders in self._holders(batch_sizes).items()]
            rounds = [(one.samples, one.steps_a_pass(holders), one.taken(holders)) for one, holders in held]
            wanted = epochs * sum(samples for samples, _, _ in rounds)

            def behind(steps: int) -> int:
                return sum(steps // each * samples + steps % each * taken for samples, each, taken in rounds)

            longest = max(each for _, each, _ in rounds)
            self._steps = max(1, bisect.bisect_left(range(math.ceil(epochs) * longest), wanted, key=behind))
        return self._steps

    def epoch_fraction(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> float:
        """Return how often as many samples were taken as those who are there have."""
        behind, samples = self._behind([self._place(cursor, part) for part in range(self._count)], batch_sizes)
        return behind / samples

    def _behind(self, places: Sequence[Cursor], batch_sizes: Mapping[int, int]) -> tuple[int, int]:
        held = {part: self._streams[part].samples for part in self._holders(batch_sizes)}
        behind = sum(places[part].epoch * size + places[part].offset for part, size in held.items())
        return behind, sum(held.values())

    @property
    def _count(self) -> int:
        return max(self._parts) + 1

    def _part_of(self, rank: int) -> int:
        return self._parts[rank]

    def _numbers(self, part: int, batch: list[int]) -> list[int]:
        return batch

    def _holders(self, batch_sizes: Mapping[int, int]) -> dict[int, dict[int, int]]:
        """Return those of the parts of which it is known how much they hold: who was lost at the start has not said."""
        return {part: held for part, held in super()._holders(batch_sizes).items() if part in self._streams}

    def _joined(self, places: Sequence[Cursor], batch_sizes: Mapping[int, int]) -> Cursor:
        parts = tuple((place.epoch, place.offset) for place in places)
        behind, samples = self._behind(places, batch_sizes)
        return Cursor(behind // samples, behind % samples, parts)
