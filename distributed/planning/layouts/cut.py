"""Where a model is cut into the stages of a pipeline: the cut in whole blocks with the shortest step, exactly.

The search goes through all cuts from the front to the back of the model, and leaves out those of which it knows that
they cannot be better: a step takes at least as long as the slowest stage so far, the slowest one that the blocks left
over allow, and all their seconds together. The latter two come from dynamic programming from the back, block by block
and stage by stage, with the memory of each device. With more than :data:`MOST_EXACT` devices, or more than
:data:`MOST_EXACT_BLOCKS` blocks, of all ways to reach a block the ones are left out that have both a slower slowest
stage and more seconds than another: they could be better only by waiting less for round trips.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import NamedTuple

from distributed.planning.cost_model import bottlenecks_of, contention_factor, transfer_seconds
from distributed.planning.documents.cluster import Cluster
from distributed.planning.layouts.pipeline_step import PipelineStep, pipeline_step
from training.layouts.orders import micro_batches_under_way

_FP32 = 4
MOST_EXACT, MOST_EXACT_BLOCKS = 5, 100
"""Devices and blocks up to which the search is exact."""


class StageDevice(NamedTuple):
    """A device that can hold a stage."""

    name: str
    """Name of its machine, or of the device of a machine, in the cluster."""
    seconds: tuple[float, ...]
    """Seconds in which it computes forward and backward of a micro-batch in each block of the model."""
    ends: Callable[[int], Sequence[int]]
    """Returns, for a number of micro-batches under way, the end (exclusive) of the longest stage that fits its memory
    from each block on; the block itself if not even this one fits."""


class Boundary(NamedTuple):
    """Bytes of a micro-batch that cross from a block to the next one."""

    forward: float
    backward: float
    """Those of gradients; 0 if nothing before it is trained."""


class PlannedCut(NamedTuple):
    """A cut and its predicted step."""

    bounds: tuple[int, ...]
    """Stage ``k`` holds the blocks from ``bounds[k]`` to ``bounds[k + 1]``, exclusive."""
    step: PipelineStep
    tied_sum: float
    """Seconds of a step for the sum of the gradients of a tied embedding that two stages hold."""
    exchange: float
    """Seconds of a step for the exchanges between the members."""

    @property
    def seconds(self) -> float:
        return self.step.seconds + self.tied_sum + self.exchange


class _Tail(NamedTuple):
    """Lower bounds for the blocks from one on, over the stages that are left."""

    slowest: float
    total: float


class _Branch(NamedTuple):
    """The front stages of a cut."""

    floor: float
    """Lower bound of a step with them, in seconds."""
    bounds: tuple[int, ...]
    slowest: float
    """Seconds of the slowest of these stages."""
    total: float
    """Seconds of all of them."""


@dataclass(frozen=True)
class StageChain:
    """Devices in the order of a pipeline's stages. Several members have the same cut; a *column* is the devices that
    hold the same stage."""

    columns: tuple[tuple[StageDevice, ...], ...]
    """The devices of each stage, one of every member, in the order of the members."""
    boundaries: tuple[Boundary, ...]
    """What crosses behind each block; of the last one nothing."""
    cluster: Cluster
    micro_batches: int
    """Of each member in a step."""
    extra: int = 0
    """See :func:`training.layouts.orders.micro_batches_under_way`."""
    trained: tuple[int, ...] = ()
    """Trained parameters of each block, which members exchange; empty: one member."""
    interval: int = 1
    """Steps between two exchanges."""
    tied_bytes: float = 0.0
    """Gradients of an embedding that the head shares; 0: there is none, or it is not trained."""
    embedding: int = 0
    """The block with this embedding; the head is in the last one."""

    @property
    def members(self) -> int:
        return len(self.columns[0])

    @property
    def blocks(self) -> int:
        return len(self.boundaries)

    @cached_property
    def under_way(self) -> tuple[int, ...]:
        """Micro-batches that each stage has under way."""
        stages = len(self.columns)
        return tuple(micro_batches_under_way(stage, stages, self.micro_batches, self.extra) for stage in range(stages))

    @cached_property
    def _sums(self) -> list[list[list[float]]]:
        """Seconds of all blocks before one, by stage and member."""
        return [[[0.0, *accumulate(device.seconds)] for device in column] for column in self.columns]

    @cached_property
    def _ends(self) -> list[list[int]]:
        """The end of the longest stage from each block on that fits all devices of a column."""
        return [
            [min(ends) for ends in zip(*(device.ends(count) for device in column), strict=True)]
            for column, count in zip(self.columns, self.under_way, strict=True)
        ]

    @property
    def is_linked(self) -> bool:
        """Whether neighbours in the pipeline, all devices of a column, and those that may hold a tied embedding reach
        each other."""
        neighbours = (
            (left.name, right.name) for ends in pairwise(self.columns) for left, right in zip(*ends, strict=True)
        )
        columns = ((left.name, right.name) for column in self.columns for left in column for right in column)
        holders = self.columns[: (1 if self.embedding == 0 else None) if self.tied_bytes else 0]
        tied = ((left.name, right.name) for ends in holders for left, right in zip(ends, self.columns[-1], strict=True))
        return all(self.cluster.reaches(*ends) for ends in (*neighbours, *columns, *tied))

    # ------------------------------------------------------------------------------------------------------------ costs

    def stage_seconds(self, stage: int, start: int, end: int) -> float:
        """Return the seconds of a micro-batch in a stage of these blocks, of the slowest member."""
        return max(sums[end] - sums[start] for sums in self._sums[stage])

    @cached_property
    def _transfer(self) -> Callable[[int, Boundary], float]:
        return cache(self._crossing)

    def _crossing(self, stage: int, boundary: Boundary) -> float:
        """Return the seconds of a micro-batch and its gradient over the boundary behind a stage, of the slowest
        member."""

        def seconds(source: str, target: str) -> float:
            link = self.cluster.link(source, target)
            if link is None:  # two devices of one machine
                return 0.0
            return (
                transfer_seconds(boundary.forward, link.mbit)
                + transfer_seconds(boundary.backward, link.mbit_back)
                + link.rtt_ms / 1000
            )

        ends = zip(self.columns[stage], self.columns[stage + 1], strict=True)
        return max(seconds(source.name, target.name) for source, target in ends)

    @cached_property
    def _network(self) -> Callable[[tuple[Boundary, ...]], float]:
        return cache(self._busiest)

    def _busiest(self, crossed: tuple[Boundary, ...]) -> float:
        """Return for how long the busiest resource of the network is busy with one micro-batch of all members."""
        flows: dict[tuple[str, str], float] = {}
        for boundary, ends in zip(crossed, pairwise(self.columns), strict=True):
            for source, target in zip(*ends, strict=True):
                if not self.cluster.on_one_machine((source.name, target.name)):
                    for flow, size in zip(
                        ((source.name, target.name), (target.name, source.name)), boundary, strict=True
                    ):
                        flows[flow] = flows.get(flow, 0.0) + size
        return max((busy.seconds for busy in bottlenecks_of(self.cluster, flows).values()), default=0.0)

    def _exchange(self, bounds: Sequence[int]) -> float:
        """Return the seconds of a step for the mean of the members' gradients or weights: a device sends
        ``2 (G - 1) / G`` of its stage's trained parameters, in fp32, to its column (Thakur et al. 2005, section 4)."""
        if self.members == 1:
            return 0.0
        share = 2 * (self.members - 1) / self.members * _FP32 * contention_factor(self.members) / self.interval
        return max(
            transfer_seconds(share * sum(self.trained[start:end]), rate)
            for (start, end), rate in zip(pairwise(bounds), self._column_rates, strict=True)
        )

    def _tied_sum(self, holder: int) -> float:
        """Return the seconds for the sum of a tied embedding's gradients behind the last backward: its stage and the
        last one send theirs to each other at the same time (:func:`training.layouts.carrier.sum_among`)."""
        if holder == len(self.columns) - 1:
            return 0.0
        pairs = list(zip(self.columns[holder], self.columns[-1], strict=True))
        links = (self.cluster.link(source.name, target.name) for source, target in pairs)
        rates = [min(link.mbit, link.mbit_back) for link in links if link is not None]
        return transfer_seconds(self.tied_bytes, min(rates)) if rates else 0.0

    @cached_property
    def _column_rates(self) -> list[float]:
        """The rate of the slowest link between the devices of each column, in Mbit/s."""

        def rates(column: tuple[StageDevice, ...]) -> Iterator[float]:
            links = (self.cluster.link(left.name, right.name) for left in column for right in column)
            return (min(link.mbit, link.mbit_back) for link in links if link is not None)

        return [min(rates(column), default=inf) for column in self.columns]

    def planned(self, bounds: tuple[int, ...]) -> PlannedCut:
        """Return the predicted step of a cut, whether it fits the memory or not."""
        compute = [self.stage_seconds(stage, *ends) for stage, ends in enumerate(pairwise(bounds))]
        crossed = tuple(self.boundaries[end - 1] for end in bounds[1:-1])
        transfers = [self._transfer(stage, boundary) for stage, boundary in enumerate(crossed)]
        step = pipeline_step(compute, transfers, self.under_way, self.micro_batches, self._network(crossed))
        holder = bisect_right(bounds, self.embedding) - 1
        return PlannedCut(bounds, step, self._tied_sum(holder), self._exchange(bounds))

    def fits(self, bounds: Sequence[int]) -> bool:
        """Whether every device has the memory for its stage of a cut."""
        return all(end <= ends[start] for (start, end), ends in zip(pairwise(bounds), self._ends, strict=True))

    # ----------------------------------------------------------------------------------------------------------- search

    def best(self, limit: float = inf) -> PlannedCut | None:
        """Return the cut with the shortest step that fits the memory; ``None`` if none does in less than ``limit``
        seconds."""
        best: PlannedCut | None = None
        pending = [_Branch(0.0, (0,), 0.0, 0.0)] if self._reaches_the_end(limit) else []
        reached: dict[tuple[int, int], list[_Branch]] = {}
        while pending:
            branch = pending.pop()
            if branch.floor >= limit:
                continue
            if len(self.columns) * self.members > MOST_EXACT or self.blocks > MOST_EXACT_BLOCKS:
                others = reached.setdefault((len(branch.bounds), branch.bounds[-1]), [])
                if any(other.slowest <= branch.slowest and other.total <= branch.total for other in others):
                    continue
                others.append(branch)
            if len(branch.bounds) <= len(self.columns):
                pending += sorted(self._longer(branch, limit), reverse=True)
            elif (planned := self.planned(branch.bounds)).seconds < limit:
                best, limit = planned, planned.seconds
        return best

    def _reaches_the_end(self, limit: float) -> bool:
        """Whether stages as long as memory and time allow hold all blocks: a necessary condition, quickly checked."""
        periods, reached = max(1, self.micro_batches - 1), 0
        fill = self._least_compute + self._least_transfers + self._least_tied_sum
        longest = (limit - fill) / periods if self.micro_batches > 1 else limit
        for ends, column in zip(self._ends, self._sums, strict=True):
            start = min(reached, self.blocks - 1)
            in_time = min(bisect_right(sums, (sums[start] + longest) * (1 + 1e-9)) - 1 for sums in column)
            reached = max(reached, min(in_time, max(ends[: start + 1])))
        return reached == self.blocks

    def _longer(self, branch: _Branch, limit: float) -> Iterator[_Branch]:
        """Yield the cuts with one stage more that may take less than ``limit`` seconds."""
        stage, start = len(branch.bounds) - 1, branch.bounds[-1]
        for end in range(start + 1, self._ends[stage][start] + 1):
            if (tail := self._tails[stage + 1][end]) is not None:
                seconds = self.stage_seconds(stage, start, end)
                slowest, total = max(branch.slowest, seconds), branch.total + seconds
                floor = self._floor(max(slowest, tail.slowest), total + tail.total)
                if floor < limit:
                    yield _Branch(floor, (*branch.bounds, end), slowest, total)

    def _floor(self, slowest: float, total: float) -> float:
        """Return a lower bound of a step with such stages: seconds of the slowest one, and of all together."""
        fill = total + self._least_transfers
        waits = fill / self.under_way[0] if self.under_way[0] < self.micro_batches else 0.0
        return (self.micro_batches - 1) * max(slowest, self._least_network, waits) + fill + self._least_tied_sum

    @cached_property
    def _smallest(self) -> tuple[Boundary, ...]:
        """For each boundary between stages, as few bytes as cross behind any block."""
        inner = self.boundaries[:-1]
        smallest = Boundary(*(min(sizes, default=0.0) for sizes in (zip(*inner, strict=True) if inner else ((), ()))))
        return (smallest,) * (len(self.columns) - 1)

    @cached_property
    def largest_extra(self) -> int:
        """The value of ``extra`` beyond which no stage waits for a round trip, whatever the cut."""
        largest = Boundary(*map(max, zip(*self.boundaries, strict=True)))
        transfers = (self._transfer(stage, largest) for stage in range(len(self.columns) - 1))
        slowest, transfer = self._least_compute / len(self.columns), max(transfers, default=0.0)
        ratio = transfer / slowest if slowest else inf if transfer else 0.0
        return ceil(min(self.micro_batches - 1, ratio))

    @cached_property
    def _least_compute(self) -> float:
        """Seconds of a micro-batch if each block was on the device that is fastest with it."""
        columns = [
            [max(seconds) for seconds in zip(*(d.seconds for d in column), strict=True)] for column in self.columns
        ]
        return float(sum(map(min, zip(*columns, strict=True))))

    @cached_property
    def _least_transfers(self) -> float:
        return sum(self._transfer(stage, boundary) for stage, boundary in enumerate(self._smallest))

    @cached_property
    def _least_tied_sum(self) -> float:
        return self._tied_sum(0) if self.embedding == 0 else 0.0

    @cached_property
    def _least_network(self) -> float:
        return self._network(self._smallest)

    @cached_property
    def _tails(self) -> list[list[_Tail | None]]:
        """For each stage and block: lower bounds if the stages from this one on hold the blocks from this one on;
        ``None`` if these do not fit."""
        nothing: list[_Tail | None] = [None] * (self.blocks + 1)
        tails = [[*nothing[:-1], _Tail(0.0, 0.0)]]
        for stage in reversed(range(len(self.columns))):
            tails.insert(0, [*(self._tail(stage, start, tails[0]) for start in range(self.blocks)), None])
        return tails

    def _tail(self, stage: int, start: int, behind: Sequence[_Tail | None]) -> _Tail | None:
        slowest, total = inf, inf
        for end in range(start + 1, self._ends[stage][start] + 1):
            if (tail := behind[end]) is not None:
                seconds = self.stage_seconds(stage, start, end)
                slowest, total = min(slowest, max(seconds, tail.slowest)), min(total, seconds + tail.total)
        return _Tail(slowest, total) if total < inf else None
