"""Members that train on their own data, which stay on their machines: the option ``local_data``.

No member knows how many samples the others have, so all report their sizes before the first step, and a newcomer when
it joins. They report nothing else of their data: neither samples nor hashes of them leave a machine.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from profiles.errors import BadInput, counted
from training.data.partitions import Schedule, SplitSchedule, schedule_of, stream_seed
from training.data.sample_order import Cursor, SampleSchedule, evaluation_slice
from training.data.stream_schedule import UNENDING, StreamSchedule
from training.exchange.base import Exchange, JoiningState
from training.loop.data_fingerprint import BROUGHT_BACK
from training.records.bounded_fields import Count
from training.records.plan import RunPlan
from training.tasks.base import Task
from training.tasks.own_code.streams import Stream

Sizes = dict[str, int]
"""Samples by split, ``train`` among them."""
_SIZES = TypeAdapter(Annotated[dict[str, Count], Field(max_length=8)])
_STATE = TypeAdapter(dict[int, dict[str, Count]])


def schedule_for(plan: RunPlan, task: Task, rank: int, exchange: Exchange) -> Schedule:
    """Return the schedule of the samples, from the plan and, where data stay on machines, from the members' reports.

    Raises:
        BadInput: there are no samples, or none can be split in this way.
    """
    stays = plan.profile.data.local_data and plan.world_size > 1
    return LocalSchedule(plan, task, rank, exchange) if stays else schedule_of(plan, task)


def total_steps(plan: RunPlan, schedule: Schedule) -> int:
    """Return the steps of a run with the members that it began with."""
    sizes = {member.rank: member.batch_size for member in plan.first_members}
    return plan.profile.training.max_steps or schedule.total_steps(sizes, plan.profile.training.epochs)


class LocalSchedule(SplitSchedule):
    """Members that train on the data of their machines.

    Members of one machine that read one path share its data; every other member holds its own partition. Each partition
    has its own order and starts again when it is used up. An epoch is over when as many samples were taken as all
    members' data hold together: on average each has then been through its own once. Every sample of a step has the same
    weight, so a member that contributes more samples counts more.

    Args:
        plan: of the run.
        task: prepared, with the data of this member.
        rank: this member.
        exchange: carries the sizes; the constructor is a collective call of all members.

    Raises:
        BadInput: there are no samples, or not those that the run began with.
    """

    def __init__(self, plan: RunPlan, task: Task, rank: int, exchange: Exchange) -> None:
        super().__init__([], [], task.lengths())
        self._settings, self._task, self._rank = plan.profile.training, task, rank
        self._name = plan.all_members[rank].name
        self._drop_last = self._settings.drop_last
        self._sizes: dict[int, Sizes] = {}
        """The sizes that all members know, by partition."""
        self._steps = 0
        self._partition_of_rank: list[int] = []
        """Number of each member's partition, by rank."""
        self._live_partitions: frozenset[int] = frozenset()
        self.arrived: JoiningState | None = None
        """The joining state of a newcomer, which needs the sizes before anything is built on them."""
        self._grow(plan)
        train = UNENDING if isinstance(task.train, Stream) else len(task.train)
        own_sizes = {"train": train, **{split: len(data) for split, data in task.evaluation.items()}}
        self._own_sizes = own_sizes
        if exchange.is_newcomer:
            self.arrived = exchange.fetch_state()
            self._take_over(self.arrived.state["holdings"])
        else:
            self._agree(exchange, "start/sizes")
        self._add_stream(self._partition_of_rank[rank], own_sizes)
        self._live_partitions = frozenset(self._partition_of_rank[member.rank] for member in plan.members)

    # ------------------------------------------------------------------------------------------------ who has how much

    def state(self) -> dict[str, Any]:
        """Return the sizes and steps that a newcomer needs."""
        return {"sizes": {str(partition): sizes for partition, sizes in self._sizes.items()}, "steps": self._steps}

    def follow(self, plan: RunPlan, live: Sequence[int], exchange: Exchange, step: int) -> Iterator[str]:
        """Record the live members after ``step``; new ones report their sizes. A collective call of all members.

        Yields:
            A line about each partition that is gone or back.
        """
        self._grow(plan)
        if any(self._partition_of_rank[rank] not in self._sizes for rank in live):
            self._agree(exchange, f"sizes/{step}")
        live_partitions = frozenset(self._partition_of_rank[rank] for rank in live)
        for partition in sorted(self._live_partitions ^ live_partitions):
            name = next(
                member.machine or member.name
                for member in plan.all_members
                if self._partition_of_rank[member.rank] == partition
            )
            size = self._sizes.get(partition, {}).get("train", 0)
            samples = counted(size, "training sample") if size < UNENDING else "training samples"
            if partition in live_partitions:
                yield f"the {samples} of {name} are trained on from here on"
            else:
                yield f"the {samples} of {name} stay on it: they are not trained on until it is back"
        self._live_partitions = live_partitions

    @property
    def splits(self) -> list[str]:
        """The evaluation splits that any member has."""
        named = dict.fromkeys(split for partition in sorted(self._sizes) for split in self._sizes[partition])
        return [split for split in named if split != "train"]

    def shares(self, split: str, members: Mapping[int, int]) -> dict[int, range]:
        """Return which samples of its own each member evaluates: members that share data divide them.

        Args:
            members: batch sizes by rank.
        """
        indices_by_rank = {}
        for partition, holders in self._holders(members).items():
            size = self._sizes.get(partition, {}).get(split, 0)
            indices_by_rank.update({rank: evaluation_slice(size, holders, rank) for rank in holders})
        return dict(sorted(indices_by_rank.items()))

    def _grow(self, plan: RunPlan) -> None:
        """Number the partitions of all members; existing numbers do not change."""
        is_per_rank = self._task.depends_on_rank
        keys = [(m.machine, m.data, m.rank if is_per_rank else 0) for m in plan.all_members]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self._partition_of_rank = [numbers[key] for key in keys]
        self._blocks = [0] * len(numbers)
        for member in plan.all_members:
            block = member.batch_size if member.rank < plan.world_size else 0
            self._blocks[self._partition_of_rank[member.rank]] += block
        for member in plan.added:
            self._blocks[self._partition_of_rank[member.rank]] = (
                self._blocks[self._partition_of_rank[member.rank]] or member.batch_size
            )

    def _agree(self, exchange: Exchange, name: str) -> None:
        gathered = exchange.gather(name, json.dumps(self._own_sizes).encode())
        for rank, payload in sorted(gathered.items()):
            if self._partition_of_rank[rank] not in self._sizes:
                try:
                    self._sizes[self._partition_of_rank[rank]] = _SIZES.validate_json(payload)
                except ValidationError:
                    continue  # it counts as a member without data until it reports valid sizes
            if rank == self._rank and self._sizes[self._partition_of_rank[rank]] != self._own_sizes:
                raise self._changed()
        for partition, sizes in self._sizes.items():
            self._add_stream(partition, sizes)

    def _take_over(self, state: Any) -> None:
        self._sizes, self._steps = _STATE.validate_python(state["sizes"]), int(state["steps"])
        if self._sizes.get(self._partition_of_rank[self._rank], self._own_sizes) != self._own_sizes:
            raise self._changed()
        for partition, sizes in self._sizes.items():
            self._add_stream(partition, sizes)

    def _changed(self) -> BadInput:
        message = f"{self._name} has other data than it began with, or than another worker of its machine"
        return BadInput(message, BROUGHT_BACK)

    def _add_stream(self, partition: int, sizes: Sizes) -> None:
        """Make the sample order of a partition; only its holders need the lengths of its samples."""
        if partition not in self._streams and sizes.get("train", 0):
            settings, is_own = self._settings, partition == self._partition_of_rank[self._rank]
            block = settings.gradient_accumulation * self._blocks[partition]
            seed, lengths = stream_seed(settings.seed, partition), self._lengths if is_own else None
            if sizes["train"] >= UNENDING:
                self._streams[partition] = StreamSchedule(None, seed, settings.gradient_accumulation)
                return
            self._streams[partition] = SampleSchedule(
                sizes["train"], seed, settings.gradient_accumulation, settings.drop_last, lengths, block
            )

    # ------------------------------------------------------------------------------------------------ epochs of all

    fingerprint = ""

    def total_steps(self, batch_sizes: Mapping[int, int], epochs: float) -> int:
        """Return the number of steps that take ``epochs`` times all samples; a newcomer takes over the number that the
        others have computed."""
        if any(isinstance(stream, StreamSchedule) for stream in self._streams.values()):
            raise BadInput("data that come one after the other on each machine have no epochs", "set max_steps")
        if not self._steps:
            held = [(self._streams[partition], holders) for partition, holders in self._holders(batch_sizes).items()]
            rounds = [
                (stream.samples, stream.steps_per_pass(holders), stream.samples_per_step(holders))
                for stream, holders in held
            ]
            target_samples = epochs * sum(samples for samples, _, _ in rounds)

            def behind(steps: int) -> int:
                return sum(
                    steps // pass_steps * samples + steps % pass_steps * taken for samples, pass_steps, taken in rounds
                )

            longest = max(pass_steps for _, pass_steps, _ in rounds)
            self._steps = max(1, bisect.bisect_left(range(math.ceil(epochs) * longest), target_samples, key=behind))
        return self._steps

    def epoch_fraction(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> float:
        """Return the number of samples taken over the number that the live members have."""
        behind, samples = self._behind(
            [self._partition_cursor(cursor, partition) for partition in range(self._partition_count)], batch_sizes
        )
        return behind / samples

    def _behind(self, cursors: Sequence[Cursor], batch_sizes: Mapping[int, int]) -> tuple[int, int]:
        samples_by_partition = {partition: self._streams[partition].samples for partition in self._holders(batch_sizes)}
        behind = sum(
            cursors[partition].epoch * size + cursors[partition].offset
            for partition, size in samples_by_partition.items()
        )
        return behind, sum(samples_by_partition.values())

    @property
    def _partition_count(self) -> int:
        return max(self._partition_of_rank) + 1

    def partition_of(self, rank: int) -> int:
        """Return the number of the data of a member."""
        return self._partition_of_rank[rank]

    _partition_of = partition_of

    def _sample_indices(self, partition: int, batch: list[int]) -> list[int]:
        return batch

    def _holders(self, batch_sizes: Mapping[int, int]) -> dict[int, dict[int, int]]:
        """Return the holders of partitions with known sizes: a member lost at the start has not reported its own."""
        return {
            partition: held for partition, held in super()._holders(batch_sizes).items() if partition in self._streams
        }

    def _joint_cursor(self, cursors: Sequence[Cursor], batch_sizes: Mapping[int, int]) -> Cursor:
        behind, samples = self._behind(cursors, batch_sizes)
        return Cursor(behind // samples, behind % samples, tuple(cursors))
