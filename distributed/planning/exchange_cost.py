"""Predicts the cost of one exchange of a group, and the shards of a vector that make it fastest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from distributed.planning import cost_model
from distributed.planning.cost_model import Bottleneck
from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.corrections import NO_CORRECTIONS, Corrections
from distributed.planning.documents.document import Choice
from profiles.declarations import OptionsByOwner
from training.exchange.codecs import CHUNK_ELEMENTS, CastCodec, codec_by_name, is_short
from training.lazy import np
from training.strategies.costs import CostModel
from training.strategies.registry import cost_model as strategy_costs

LEAST_GAIN = 1.05
"""Speed-up of an exchange from which unequal shards are used instead of equal ones."""
_SLACK = 1.01
"""Factor on the time of the best shards, within which the most even ones are chosen."""
_SMALLEST_SHARD = 0.05
"""Part of an equal shard below which a member owns nothing, since it costs each of the others a message."""
_FLOOR, _ZERO = 1e-6, 1e-9
"""Least time of a resource, as a part of the longest, so that every shard is bounded; and what counts as zero."""
_MOST_PIVOTS = 10_000


def best_shards(resource_seconds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the part of a vector that each member is to own so that an exchange is fastest; their sum is 1.

    Args:
        resource_seconds: [resources][members] seconds for which each resource is busy if that member owns the whole
            vector.
    """
    members = len(resource_seconds[0])
    equal = (1 / members,) * members
    seconds = np.array(resource_seconds, dtype=float)
    longest = seconds.mean(axis=1).max()
    if longest <= 0 or members == 1:
        return equal
    seconds = np.maximum(seconds / longest, _FLOOR)
    best = 1 / _largest_sum(seconds, np.ones(len(seconds))).sum()
    if best * LEAST_GAIN > 1:
        return equal
    # Of all shards that are about as good, choose those whose largest is smallest.
    bounds = np.concatenate([np.zeros(len(seconds)), np.ones(members)])
    solution = _largest_sum(np.vstack([seconds - _SLACK * best, np.eye(members)]), bounds)
    solution /= solution.sum()
    shards = np.where(solution < _SMALLEST_SHARD / members, 0.0, solution).round(4)
    return tuple(float(shard) for shard in shards / shards.sum())


def _largest_sum(rows: Any, bounds: Any) -> Any:
    """Return the ``x >= 0`` with the largest sum under ``rows @ x <= bounds``, where no bound is negative: the simplex
    method from ``x = 0`` with Bland's rule (1977), which does not cycle."""
    count = rows.shape[1]
    table = np.vstack([np.column_stack([rows, bounds]), [*[-1.0] * count, 0.0]])
    nonbasic, basic = list(range(count)), list(range(count, count + len(rows)))
    for _ in range(_MOST_PIVOTS):  # x is feasible after each
        column = min((j for j in range(count) if table[-1, j] < -_ZERO), key=nonbasic.__getitem__, default=None)
        if column is None:
            break
        candidate_rows = np.flatnonzero(table[:-1, column] > _ZERO)
        ratios = table[candidate_rows, -1] / table[candidate_rows, column]
        row = min(candidate_rows[ratios <= ratios.min() + _ZERO], key=basic.__getitem__)
        _pivot(table, row, column)
        nonbasic[column], basic[row] = basic[row], nonbasic[column]
    solution = np.zeros(count)
    for row, variable in enumerate(basic):
        if variable < count:
            solution[variable] = max(0.0, table[row, -1])
    return solution


def _pivot(table: Any, row: int, column: int) -> None:
    """Exchange a basic and a nonbasic variable of a condensed tableau, in place."""
    pivot = table[row, column]
    pivot_row, pivot_column = table[row] / pivot, table[:, column].copy()
    table -= np.outer(pivot_column, pivot_row)
    table[row] = pivot_row
    table[:, column] = -pivot_column / pivot
    table[row, column] = 1 / pivot


_PIECES = 16
"""Pieces of a shard, unless one would be larger than a chunk (:mod:`training.exchange.mean.owners`)."""


@dataclass(frozen=True)
class ExchangeForecast:
    """Prediction of one exchange of a group."""

    seconds: float
    """Time until every member has the result; includes ``correction``."""
    slowest: Bottleneck
    shards: Mapping[str, float]
    """Part of the vector that each member owns; their sum is 1."""
    moved: tuple[tuple[str, float], ...]
    """Bytes sent and received over the network, by machine."""
    work: Mapping[str, float]
    """Seconds of each member's compute that the exchange takes while both run at the same time: training on the CPU
    uses all its cores."""
    buffered: Mapping[str, int]
    """Bytes of the others' contributions that each member, as an owner, buffers until all have arrived."""
    correction: float = 1.0
    """Factor from earlier runs, included in ``seconds``."""


class ExchangeCosts:
    """Predicts exchanges, and caches the predictions.

    Args:
        trainable: number of trained parameters.
        coordinator: machine that relays between two members without a link.
        corrections: factors from earlier predictions.
        settings: holds the strategies' own options.
    """

    def __init__(
        self,
        cluster: Cluster,
        trainable: int,
        coordinator: str = "",
        corrections: Corrections = NO_CORRECTIONS,
        settings: OptionsByOwner | None = None,
    ) -> None:
        self._corrections, self._settings = corrections, settings
        self._coordinator = coordinator
        self._cluster = cluster
        self._trainable = trainable
        self._forecasts: dict[tuple[object, ...], ExchangeForecast] = {}
        self.machine_names = {
            m.name: min(o.name for o in cluster.machines if o.host == m.host) for m in cluster.machines
        }
        """One name for all entries that share a machine, by the entry's own name."""

    def are_linked(self, choice: Choice) -> bool:
        """Whether all machines that exchange data have links."""
        flows = (flow for star in self._group(choice).stars.values() for flow in star)
        return all(self._cluster.link(source, target) is not None for source, target in flows)

    def forecast(self, choice: Choice) -> ExchangeForecast:
        """Return time and traffic of one exchange of a group whose members are linked."""
        key = (choice.members, choice.strategy, choice.engine, choice.codec)
        if key not in self._forecasts:
            forecast = self._group(choice).exchange()
            factor = self._corrections.exchange_factor(choice.members, choice.strategy, choice.engine)
            self._forecasts[key] = replace(forecast, seconds=factor * forecast.seconds, correction=factor)
        return self._forecasts[key]

    def _group(self, choice: Choice) -> _Group:
        costs = strategy_costs(choice.strategy, self._settings) or CostModel()
        relay = self.machine_names.get(self._coordinator, "") if choice.engine == "mesh" else ""
        elements = max(1, costs.carried(self._trainable, choice.codec))
        return _Group(self._cluster, choice, costs, elements, self.machine_names, relay)


class _Group:
    """The members of a choice in an exchange of a vector of ``elements``.

    All costs are linear in the sizes of the members' shards: they are computed with each member as the only owner (a
    star), and averaged with these sizes as weights.
    """

    def __init__(
        self,
        cluster: Cluster,
        choice: Choice,
        costs: CostModel,
        elements: int,
        machine_names: Mapping[str, str],
        relay: str,
    ) -> None:
        self._cluster, self._choice, self._elements, self._machine_names = cluster, choice, elements, machine_names
        count = len(choice.members)
        self._participants = min(costs.group or count, count)
        participation = _remote_share(self._participants) / _remote_share(count)
        codec = codec_by_name(choice.codec)
        self._up = participation * codec.expected_bytes(elements)
        self._down = participation * codec.expected_reply_bytes(elements, self._participants)
        in_full_mesh = choice.engine == "mesh" and self._participants == count
        self._all_gathers = costs.gathers or (in_full_mesh and self._is_short())
        if self._all_gathers:  # with equal shards: from each member to all others
            self._down = (count - 1) * self._up
        hosts = [machine_names[name] for name in choice.members]
        self.stars = {
            name: self._relayed(cost_model.star_flows(hosts, machine_names[name], self._up, self._down), relay)
            for name in choice.members
            if not choice.alone
        }
        """Bytes from machine to machine, by owner."""
        self._carried = tuple((self._up + self._down) * peers for peers in (1, count - 1))
        """Bytes that a member moves if it owns nothing, and if it owns everything."""
        self._work = (self._core_seconds(owner=False), self._core_seconds(owner=True))
        """Core seconds in both cases."""

    def _is_short(self) -> bool:
        """Whether a mean takes one round, from each member to all others."""
        codec = codec_by_name(self._choice.codec)  # codecs with residuals always go by owners
        return isinstance(codec, CastCodec) and is_short(codec, self._elements, len(self._choice.members))

    def _relayed(self, flows: cost_model.Flows, relay: str) -> dict[tuple[str, str], float]:
        """Return the flows, with those between machines without a link over the relay."""
        routed: dict[tuple[str, str], float] = {}
        for (source, target), size in flows.items():
            is_direct = not relay or self._cluster.link(source, target) is not None or relay in (source, target)
            for leg in ((source, target),) if is_direct else ((source, relay), (relay, target)):
                routed[leg] = routed.get(leg, 0.0) + size
        return routed

    def exchange(self) -> ExchangeForecast:
        choice = self._choice
        if choice.alone:
            (name,) = choice.members
            return ExchangeForecast(0.0, cost_model.NO_BOTTLENECK, {name: 1.0}, (), {name: 0.0}, {name: 0})
        stars = [
            {**cost_model.bottlenecks_of(self._cluster, star), **self._process_times(owner)}
            for owner, star in self.stars.items()
        ]
        bottlenecks = {key: bottleneck for star in stars for key, bottleneck in star.items()}
        contention = cost_model.contention_factor(self._participants)
        seconds = {
            key: [
                (1.0 if bottleneck.kind == "member" else contention) * star.get(key, cost_model.NO_BOTTLENECK).seconds
                for star in stars
            ]
            for key, bottleneck in bottlenecks.items()
        }
        shards = dict.fromkeys(choice.members, 1 / len(stars))
        if choice.engine == "mesh" and not self._all_gathers:
            shards = dict(zip(choice.members, best_shards(list(seconds.values())), strict=True))
        means = {key: sum(map(mul, star_seconds, shards.values())) for key, star_seconds in seconds.items()}
        longest = []
        for of_members in (True, False):
            keys = [key for key, bottleneck in bottlenecks.items() if (bottleneck.kind == "member") is of_members]
            key = max(keys, key=means.__getitem__, default=())
            longest.append(replace(bottlenecks[key], seconds=means[key]) if key else cost_model.NO_BOTTLENECK)
        slowest, second_longest = sorted(longest, key=lambda bottleneck: -bottleneck.seconds)
        if slowest.kind == "member":
            carried = _between(self._carried, shards[slowest.subject])
            slowest = replace(slowest, mbit=8e-6 * carried / slowest.seconds)
        total = (
            slowest.seconds + self._first_piece(max(shards.values())) * second_longest.seconds + self._fixed_seconds()
        )
        moved: dict[str, float] = {}
        for owner, star in self.stars.items():
            for ends, size in star.items():
                for end in ends:
                    moved[end] = moved.get(end, 0.0) + shards[owner] * size
        work = {name: self._compute_taken(name, shard) for name, shard in shards.items()}
        buffered = {name: int(shard * (len(shards) - 1) * self._up) for name, shard in shards.items()}
        return ExchangeForecast(total, slowest, shards, tuple(sorted(moved.items())), work, buffered)

    def _first_piece(self, largest_shard: float) -> float:
        """Return the first piece over the largest shard: the next stage cannot begin before it has arrived."""
        largest = largest_shard * self._elements
        return min(1.0, max(CHUNK_ELEMENTS / 16, min(CHUNK_ELEMENTS, largest / _PIECES)) / largest)

    def _fixed_seconds(self) -> float:
        """Return the time of an empty exchange."""
        links = (self._cluster.link(source, target) for star in self.stars.values() for source, target in star)
        round_trip = max((link.rtt_ms / 1000 for link in links if link is not None), default=0.0)
        operation = cost_model.OPERATION_SECONDS[self._choice.engine]
        return operation / min(map(self._core, self._choice.members)) + round_trip

    def _process_times(self, owner: str) -> dict[tuple[str, ...], Bottleneck]:
        """Return for how long the members' processes are busy, singly and by machine, if ``owner`` owns the whole
        vector. A process has at most one core, and the processes of a machine share its cores."""
        bottlenecks: dict[tuple[str, ...], Bottleneck] = {}
        seconds_by_machine: defaultdict[str, float] = defaultdict(float)
        for name in self._choice.members:
            seconds = self._work[name == owner]
            seconds_by_machine[self._machine_names[name]] += seconds
            bottlenecks["member", name] = Bottleneck("member", name, "", 0.0, seconds / self._core(name))
            if cores := self._cluster.machine(name).cores:
                machine_seconds = seconds_by_machine[self._machine_names[name]] / cores
                bottlenecks["members", self._machine_names[name]] = Bottleneck("member", name, "", 0.0, machine_seconds)
        return bottlenecks

    def _core_seconds(self, owner: bool) -> float:
        """Return the core seconds of a member: it encodes its contribution and decodes the reply; the owner also
        decodes all contributions and encodes the mean."""
        choice = self._choice
        transfer = cost_model.transfer_seconds(self._carried[owner], cost_model.MEMBER_MBIT[choice.engine])
        decoded = 1 + owner * len(choice.members)
        return transfer + cost_model.codec_seconds(self._elements, choice.codec, 1 + owner, decoded)

    def _core(self, name: str) -> float:
        """Return the part of one core that a process on the machine has; 1 if the number of cores is unknown."""
        return min(1.0, self._cluster.machine(name).cores or 1.0)

    def _compute_taken(self, name: str, shard: float) -> float:
        """Return the compute that an exchange takes from a member, in seconds of all its cores."""
        machine = self._cluster.machine(name)
        return _between(self._work, shard) / machine.cores if machine.device == "cpu" and machine.cores else 0.0


def _between(ends: tuple[float, ...], shard: float) -> float:
    """Interpolate between the values of a member that owns nothing and of one that owns everything."""
    return ends[0] + shard * (ends[1] - ends[0])


def _remote_share(members: int) -> float:
    """Return the part of a vector that other members own, with equal shards. Each link carries less in this ratio if
    only some members exchange at a time, averaged over the groupings."""
    return (members - 1) / members if members > 1 else 1.0
