"""What one exchange of a group costs on the links and machines that it has, and with which shares of a vector it
is quickest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from distributed.planning import cost_model
from distributed.planning.cluster import Cluster
from distributed.planning.corrections import NO_CORRECTIONS, Corrections
from distributed.planning.cost_model import Bottleneck
from distributed.planning.document import Choice
from profiles.declarations import Owning
from training.exchange.codecs import CHUNK_ELEMENTS, CastCodec, codec_by_name, is_short
from training.lazy import np
from training.strategies.costs import CostModel
from training.strategies.registry import cost_model as strategy_costs

WORTH = 1.05
"""Equal shares are kept where others would make an exchange less than so many times as fast."""
_SLACK = 1.01
"""Of the best shares' time, within which the most even ones are taken."""
_NOTHING = 0.05
"""Of an equal share: below it a member owns nothing, for it costs the others a message each."""
_LEAST, _TINY = 1e-6, 1e-9
"""Of the longest part: no part takes less, so that no share is without bounds; and what counts as zero."""
_MOST_PIVOTS = 10_000


def best_shares(parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return each member's share of a vector; they sum up to 1.

    Args:
        parts: seconds of each part of an exchange, by the member that owns everything.
    """
    members = len(parts[0])
    equal = (1 / members,) * members
    seconds = np.array(parts, dtype=float)
    longest = seconds.mean(axis=1).max()
    if longest <= 0 or members == 1:
        return equal
    seconds = np.maximum(seconds / longest, _LEAST)
    best = 1 / _largest_sum(seconds, np.ones(len(seconds))).sum()
    if best * WORTH > 1:
        return equal
    # Of all shares that are about as good, those whose largest is smallest.
    bounds = np.concatenate([np.zeros(len(seconds)), np.ones(members)])
    found = _largest_sum(np.vstack([seconds - _SLACK * best, np.eye(members)]), bounds)
    found /= found.sum()
    shares = np.where(found < _NOTHING / members, 0.0, found).round(4)
    return tuple(float(share) for share in shares / shares.sum())


def _largest_sum(rows: Any, bounds: Any) -> Any:
    """Return the ``x >= 0`` of the largest sum with ``rows @ x <= bounds``, none of which is negative: the simplex
    method from ``x = 0``, by Bland's rule (1977), which never goes round in circles."""
    count = rows.shape[1]
    table = np.vstack([np.column_stack([rows, bounds]), [*[-1.0] * count, 0.0]])
    free, basic = list(range(count)), list(range(count, count + len(rows)))
    for _ in range(_MOST_PIVOTS):  # x can be used after each
        column = min((j for j in range(count) if table[-1, j] < -_TINY), key=free.__getitem__, default=None)
        if column is None:
            break
        able = np.flatnonzero(table[:-1, column] > _TINY)
        ratios = table[able, -1] / table[able, column]
        row = min(able[ratios <= ratios.min() + _TINY], key=basic.__getitem__)
        _pivot(table, row, column)
        free[column], basic[row] = basic[row], free[column]
    found = np.zeros(count)
    for row, name in enumerate(basic):
        if name < count:
            found[name] = max(0.0, table[row, -1])
    return found


def _pivot(table: Any, row: int, column: int) -> None:
    """Exchange a basic and a free variable of a condensed tableau."""
    pivot = table[row, column]
    by, out = table[row] / pivot, table[:, column].copy()
    table -= np.outer(out, by)
    table[row] = by
    table[:, column] = -out / pivot
    table[row, column] = 1 / pivot


_PIECES = 16
"""That a share is cut into, where none gets larger than a chunk by it (:mod:`training.exchange.owners`)."""


@dataclass(frozen=True)
class ExchangeForecast:
    """One exchange of a group."""

    seconds: float
    """Until what every member gets is there; with what earlier runs corrected."""
    slowest: Bottleneck
    shares: tuple[float, ...]
    """Of the vector, that each member owns; their sum is 1."""
    moved: tuple[tuple[str, float], ...]
    """Bytes sent and received over the network, by machine."""
    work: tuple[float, ...]
    """Seconds that the exchange takes from each member's compute as far as both go on at the same time: where the
    processor trains, all its cores do."""
    kept: tuple[int, ...]
    """Bytes of the others' contributions that each member, as an owner, keeps until all are there."""
    correction: float = 1.0
    """Factor of earlier runs, which ``seconds`` has in it."""


class ExchangeCosts:
    """Predicts exchanges, each once.

    Args:
        trainable: how many parameters are trained.
        coordinator: machine that passes on what two members without a link send each other.
        corrections: how far off earlier predictions were.
        settings: with the strategies' own options.
    """

    def __init__(
        self,
        cluster: Cluster,
        trainable: int,
        coordinator: str = "",
        corrections: Corrections = NO_CORRECTIONS,
        settings: Owning | None = None,
    ) -> None:
        self._corrections, self._settings = corrections, settings
        self._coordinator = coordinator
        self._cluster = cluster
        self._trainable = trainable
        self._known: dict[tuple[object, ...], ExchangeForecast] = {}
        self.places = {m.name: min(o.name for o in cluster.machines if o.host == m.host) for m in cluster.machines}
        """The name that stands for the machine of an entry, by the entry's: entries may share one."""

    def linked(self, choice: Choice) -> bool:
        """Whether all machines that have to reach each other can."""
        flows = (flow for star in self._group(choice).stars for flow in star)
        return all(self._cluster.link(one, other) is not None for one, other in flows)

    def of(self, choice: Choice) -> ExchangeForecast:
        """Return time and traffic of one exchange of a group whose members are linked."""
        key = (choice.members, choice.strategy, choice.engine, choice.codec)
        if key not in self._known:
            found = self._group(choice).exchange()
            factor = self._corrections.exchange_of(choice.members, choice.strategy, choice.engine)
            self._known[key] = replace(found, seconds=factor * found.seconds, correction=factor)
        return self._known[key]

    def _group(self, choice: Choice) -> _Group:
        costs = strategy_costs(choice.strategy, self._settings) or CostModel()
        relay = self.places.get(self._coordinator, "") if choice.engine == "mesh" else ""
        elements = max(1, costs.carried(self._trainable, choice.codec))
        return _Group(self._cluster, choice, costs, elements, self.places, relay)


class _Group:
    """The members of a choice in an exchange of so many elements.

    Everything is linear in the members' shares: it is worked out for every member as the only owner (a star), and the
    rest is the mean of these, weighted by the shares.
    """

    def __init__(
        self, cluster: Cluster, choice: Choice, costs: CostModel, elements: int, places: Mapping[str, str], relay: str
    ) -> None:
        self._cluster, self._choice, self._elements, self._places = cluster, choice, elements, places
        count = len(choice.members)
        self._meeting = min(costs.group or count, count)
        rarer = _peers_a_value(self._meeting) / _peers_a_value(count)
        codec = codec_by_name(choice.codec)
        self._up = rarer * codec.expected_bytes(elements)
        self._down = rarer * codec.expected_reply_bytes(elements, self._meeting)
        self._gathers = costs.gathers or (choice.engine == "mesh" and self._meeting == count and self._is_short())
        if self._gathers:  # with equal shares: everybody's to everybody
            self._down = (count - 1) * self._up
        hosts = [places[name] for name in choice.members]
        stars = (cost_model.star_flows(hosts, owner, self._up, self._down) for owner in hosts)
        self.stars = [self._led(star, relay) for star in stars] if not choice.alone else []
        """Bytes from machine to machine, by owner."""
        self._carried = tuple((self._up + self._down) * peers for peers in (1, count - 1))
        """Bytes that a member moves, as another one and as the owner."""
        self._work = (self._core_seconds(owner=False), self._core_seconds(owner=True))
        """Core seconds of both."""

    def _is_short(self) -> bool:
        """Whether a mean goes in one round, from everybody to everybody."""
        codec = codec_by_name(self._choice.codec)  # those that lose more have streams of residuals, which go by owners
        return isinstance(codec, CastCodec) and is_short(codec, self._elements, len(self._choice.members))

    def _led(self, flows: cost_model.Flows, relay: str) -> dict[tuple[str, str], float]:
        """Return flows that go through the coordinator where two machines have no link."""
        found: dict[tuple[str, str], float] = {}
        for (source, target), size in flows.items():
            direct = not relay or self._cluster.link(source, target) is not None or relay in (source, target)
            for leg in ((source, target),) if direct else ((source, relay), (relay, target)):
                found[leg] = found.get(leg, 0.0) + size
        return found

    def exchange(self) -> ExchangeForecast:
        choice = self._choice
        if choice.alone:
            return ExchangeForecast(0.0, cost_model.NOTHING, (1.0,), (), (0.0,), (0,))
        stars = [
            {**cost_model.parts_of(self._cluster, star), **self._processes(owner)}
            for star, owner in zip(self.stars, choice.members, strict=True)
        ]
        parts = {key: one for star in stars for key, one in star.items()}
        turns = cost_model.turns_factor(self._meeting)
        seconds = {
            key: [
                (1.0 if one.kind == "member" else turns) * star.get(key, cost_model.NOTHING).seconds for star in stars
            ]
            for key, one in parts.items()
        }
        shares = (1 / len(stars),) * len(stars)
        if choice.engine == "mesh" and not self._gathers:
            shares = best_shares(list(seconds.values()))
        means = {key: sum(map(mul, each, shares)) for key, each in seconds.items()}
        longest = []
        for of_members in (True, False):
            own = [key for key, one in parts.items() if (one.kind == "member") is of_members]
            key = max(own, key=means.__getitem__, default=())
            longest.append(replace(parts[key], seconds=means[key]) if key else cost_model.NOTHING)
        slowest, other = sorted(longest, key=lambda part: -part.seconds)
        if slowest.kind == "member":
            carried = _between(self._carried, shares[choice.members.index(slowest.subject)])
            slowest = replace(slowest, mbit=8e-6 * carried / slowest.seconds)
        total = slowest.seconds + self._first(shares) * other.seconds + self._fixed()
        moved: dict[str, float] = {}
        for star, share in zip(self.stars, shares, strict=True):
            for ends, size in star.items():
                for end in ends:
                    moved[end] = moved.get(end, 0.0) + share * size
        work = tuple(self._taken(name, share) for name, share in zip(choice.members, shares, strict=True))
        kept = tuple(int(share * (len(shares) - 1) * self._up) for share in shares)
        return ExchangeForecast(total, slowest, shares, tuple(sorted(moved.items())), work, kept)

    def _first(self, shares: tuple[float, ...]) -> float:
        """Return the first piece of the largest share, as a part of it: nothing else can begin before it is there."""
        widest = max(shares) * self._elements
        return min(1.0, max(CHUNK_ELEMENTS / 16, min(CHUNK_ELEMENTS, widest / _PIECES)) / widest)

    def _fixed(self) -> float:
        """Return the seconds of an exchange of nothing."""
        links = (self._cluster.link(source, target) for star in self.stars for source, target in star)
        round_trip = max((link.rtt_ms / 1000 for link in links if link is not None), default=0.0)
        return cost_model.OPERATION[self._choice.engine] / min(map(self._core, self._choice.members)) + round_trip

    def _processes(self, owner: str) -> dict[tuple[str, ...], Bottleneck]:
        """Return how long the processes of the members work, and those of each machine together, where one member owns
        everything. A process has at most one core, and all of a machine have its cores between them."""
        found: dict[tuple[str, ...], Bottleneck] = {}
        together: defaultdict[str, float] = defaultdict(float)
        for name in self._choice.members:
            seconds = self._work[name == owner]
            together[self._places[name]] += seconds
            found["member", name] = Bottleneck("member", name, "", 0.0, seconds / self._core(name))
            if cores := self._cluster.machine(name).cores:
                done = together[self._places[name]] / cores
                found["members", self._places[name]] = Bottleneck("member", name, "", 0.0, done)
        return found

    def _core_seconds(self, owner: bool) -> float:
        """A member encodes its contribution and decodes what comes back; the owner decodes everybody's as well, and
        encodes the mean."""
        choice = self._choice
        moving = cost_model.transfer(self._carried[owner], cost_model.MEMBER_MBIT[choice.engine])
        decoded = 1 + owner * len(choice.members)
        return moving + cost_model.codec_seconds(self._elements, choice.codec, 1 + owner, decoded)

    def _core(self, name: str) -> float:
        """Return how much of one core a process there has; one where it is unknown."""
        return min(1.0, self._cluster.machine(name).cores or 1.0)

    def _taken(self, name: str, share: float) -> float:
        """Return the compute that an exchange takes from a member, in seconds of all its cores."""
        machine = self._cluster.machine(name)
        return _between(self._work, share) / machine.cores if machine.device == "cpu" and machine.cores else 0.0


def _between(ends: tuple[float, ...], share: float) -> float:
    """Return the mean of nothing owned and everything owned."""
    return ends[0] + share * (ends[1] - ends[0])


def _peers_a_value(members: int) -> float:
    """Return to how many other ones a member's value goes and comes back from, where everybody owns as much: each link
    carries that much less where only some meet at once, on average over who meets whom."""
    return (members - 1) / members if members > 1 else 1.0
