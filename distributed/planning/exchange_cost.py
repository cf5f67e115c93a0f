"""What one exchange of a group costs on the links and machines that it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distributed.planning import cost_model
from distributed.planning.cluster import Cluster
from distributed.planning.corrections import NO_CORRECTIONS, Corrections
from distributed.planning.cost_model import Bottleneck
from distributed.planning.document import Choice
from distributed.planning.ownership import best_shares
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name
from training.strategies.registry import cost_model as strategy_costs

_PIECES = 16
"""That a share is cut into, where none gets larger than a chunk by it (:mod:`training.exchange.owners`)."""


@dataclass(frozen=True)
class Exchange:
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
    correction: float = 1.0
    """Factor of earlier runs, which ``seconds`` has in it."""


class ExchangeCosts:
    """Predicts exchanges, each once.

    Args:
        cluster: what was measured.
        trainable: how many parameters are trained.
        coordinator: machine that passes on what two members without a link send each other.
        corrections: how far off earlier predictions were.
    """

    def __init__(
        self, cluster: Cluster, trainable: int, coordinator: str = "", corrections: Corrections = NO_CORRECTIONS
    ) -> None:
        self._corrections = corrections
        self._coordinator = coordinator
        self._cluster = cluster
        self._trainable = trainable
        self._known: dict[tuple[object, ...], Exchange] = {}
        self.places = {m.name: min(o.name for o in cluster.machines if o.host == m.host) for m in cluster.machines}
        """The name that stands for the machine of an entry, by the entry's: entries may share one."""

    def linked(self, choice: Choice) -> bool:
        """Whether everything that has to talk to each other can."""
        flows = (flow for star in self._group(choice).stars for flow in star)
        return all(self._cluster.link(one, other) is not None for one, other in flows)

    def of(self, choice: Choice) -> Exchange:
        """Return time and traffic of one exchange of a group whose members are linked."""
        key = (choice.members, choice.strategy, choice.engine, choice.codec)
        if key not in self._known:
            found = self._group(choice).exchange()
            factor = self._corrections.exchange_of(choice.members, choice.strategy, choice.engine)
            self._known[key] = replace(found, seconds=factor * found.seconds, correction=factor)
        return self._known[key]

    def _group(self, choice: Choice) -> _Group:
        costs = strategy_costs(choice.strategy)
        elements = max(1, costs.elements(self._trainable)) if costs is not None else self._trainable
        return _Group(self._cluster, choice, elements, self.places, self._coordinator)


class _Group:
    """The members of a choice in an exchange of so many elements.

    Everything is linear in the members' shares: it is worked out for every member as the only owner (a star), and the
    rest is the mean of these, weighted by the shares.
    """

    def __init__(
        self, cluster: Cluster, choice: Choice, elements: int, places: Mapping[str, str], coordinator: str
    ) -> None:
        self._cluster, self._choice, self._elements, self._places = cluster, choice, elements, places
        self._up = cost_model.payload_bytes(elements, choice.codec)
        self._down = codec_by_name(choice.codec).expected_reply_bytes(elements, len(choice.members))
        hosts = [places[name] for name in choice.members]
        relay = places.get(coordinator, "") if choice.engine == "mesh" else ""
        stars = (cost_model.star_flows(hosts, owner, self._up, self._down) for owner in hosts)
        self.stars = [self._led(star, relay) for star in stars] if not choice.alone else []
        """Bytes from machine to machine, by owner."""

    def _led(self, flows: cost_model.Flows, relay: str) -> dict[tuple[str, str], float]:
        """Return flows that go through the coordinator where two machines have no link."""
        found: dict[tuple[str, str], float] = {}
        for (source, target), size in flows.items():
            direct = not relay or self._cluster.link(source, target) is not None or relay in (source, target)
            for leg in ((source, target),) if direct else ((source, relay), (relay, target)):
                found[leg] = found.get(leg, 0.0) + size
        return found

    def exchange(self) -> Exchange:
        choice = self._choice
        if choice.alone:
            return Exchange(0.0, cost_model.NOTHING, (1.0,), (), (0.0,))
        factor = cost_model.turns_factor(len(choice.members))
        network = [cost_model.parts_of(self._cluster, star) for star in self.stars]
        network = [{key: replace(one, seconds=factor * one.seconds) for key, one in star.items()} for star in network]
        stars = [{**star, **self._processes(owner)} for star, owner in zip(network, choice.members, strict=True)]
        parts = {key: one for star in stars for key, one in star.items()}
        seconds = {key: [star[key].seconds if key in star else 0.0 for star in stars] for key in parts}
        shares = (1 / len(stars),) * len(stars)
        if choice.engine == "mesh":
            shares = best_shares(list(seconds.values()))
        parts = {key: replace(one, seconds=_mean(seconds[key], shares)) for key, one in parts.items()}
        longest = [
            _longest(one for one in parts.values() if (one.kind == "member") is member) for member in (True, False)
        ]
        slowest, other = sorted(longest, key=lambda part: -part.seconds)
        if slowest.kind == "member":
            carried = _mean([self._carried(slowest.subject == owner) for owner in choice.members], shares)
            slowest = replace(slowest, mbit=8e-6 * carried / slowest.seconds)
        total = slowest.seconds + self._first(shares) * other.seconds + self._fixed()
        moved: dict[str, float] = {}
        for star, share in zip(self.stars, shares, strict=True):
            for ends, size in star.items():
                for end in ends:
                    moved[end] = moved.get(end, 0.0) + share * size
        work = tuple(self._taken(name, shares) for name in choice.members)
        return Exchange(total, slowest, shares, tuple(sorted(moved.items())), work)

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
            seconds = self._work(name == owner)
            together[self._places[name]] += seconds
            found["member", name] = Bottleneck("member", name, "", 0.0, seconds / self._core(name))
            if cores := self._cluster.machine(name).cores:
                done = together[self._places[name]] / cores
                found["members", self._places[name]] = Bottleneck("member", name, "", 0.0, done)
        return found

    def _carried(self, owner: bool) -> float:
        """Return the bytes that a member moves, as the only owner or as another."""
        return (self._up + self._down) * (len(self._choice.members) - 1 if owner else 1)

    def _work(self, owner: bool) -> float:
        """Return the core seconds of a member: it encodes its contribution and decodes what comes back; an owner
        decodes everybody's, and encodes the mean."""
        choice = self._choice
        encoded, decoded = (2.0, 1.0 + len(choice.members)) if owner else (1.0, 1.0)
        moving = cost_model.transfer(self._carried(owner), cost_model.MEMBER_MBIT[choice.engine])
        return moving + cost_model.codec_seconds(self._elements, choice.codec, encoded, decoded)

    def _core(self, name: str) -> float:
        """Return how much of one core a process there has; one where it is unknown."""
        return min(1.0, self._cluster.machine(name).cores or 1.0)

    def _taken(self, name: str, shares: tuple[float, ...]) -> float:
        """Return the compute that an exchange takes from a member, in seconds of all its cores."""
        machine = self._cluster.machine(name)
        if machine.device != "cpu" or not machine.cores:
            return 0.0
        own = [self._work(name == owner) for owner in self._choice.members]
        return _mean(own, shares) / machine.cores


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return sum(value * share for value, share in zip(values, shares, strict=True))


def _longest(parts: Iterable[Bottleneck]) -> Bottleneck:
    return max(parts, key=lambda part: part.seconds, default=cost_model.NOTHING)
