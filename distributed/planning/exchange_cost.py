"""What one exchange of a group costs on the links and machines that it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributed.planning import cost_model
from distributed.planning.cluster import Cluster
from distributed.planning.corrections import NO_CORRECTIONS, Corrections
from distributed.planning.cost_model import Bottleneck
from distributed.planning.document import Choice
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name
from training.strategies.registry import cost_model as strategy_costs


@dataclass(frozen=True)
class Exchange:
    """One exchange of a group."""

    each: tuple[float, ...]
    """Seconds of each member's way: what it sends, until what it gets is there."""
    slowest: Bottleneck
    moved: tuple[tuple[str, float], ...]
    """Bytes sent and received over the network, by machine."""
    work: tuple[float, ...]
    """Seconds that the exchange takes from each member's compute as far as both go on at the same time: where the
    processor trains, all its cores do."""
    correction: float = 1.0
    """Factor of earlier runs, which ``each`` has in it."""

    @property
    def seconds(self) -> float:
        """Of the longest way."""
        return max(self.each)


class ExchangeCosts:
    """Predicts exchanges, each once.

    Args:
        cluster: what was measured.
        trainable: how many parameters are trained.
        corrections: how far off earlier predictions were.
    """

    def __init__(self, cluster: Cluster, trainable: int, corrections: Corrections = NO_CORRECTIONS) -> None:
        self._corrections = corrections
        self._cluster = cluster
        self._trainable = trainable
        self._known: dict[tuple[object, ...], Exchange] = {}
        self.places = {m.name: min(o.name for o in cluster.machines if o.host == m.host) for m in cluster.machines}
        """The name that stands for the machine of an entry, by the entry's: entries may share one."""

    def linked(self, choice: Choice) -> bool:
        """Whether everything that has to talk to each other can."""
        return all(self._cluster.link(one, other) is not None for one, other in self._group(choice).flows)

    def of(self, choice: Choice) -> Exchange:
        """Return time and traffic of one exchange of a group whose members are linked."""
        key = (choice.members, choice.strategy, choice.engine, choice.hub, choice.codec)
        if key not in self._known:
            found = self._group(choice).exchange()
            factor = self._corrections.exchange_of(choice.members, choice.strategy, choice.engine)
            self._known[key] = replace(found, each=tuple(factor * one for one in found.each), correction=factor)
        return self._known[key]

    def _group(self, choice: Choice) -> _Group:
        costs = strategy_costs(choice.strategy)
        elements = max(1, costs.elements(self._trainable)) if costs is not None else self._trainable
        return _Group(self._cluster, choice, elements, self.places)


class _Group:
    """The members of a choice in an exchange of so many elements."""

    def __init__(self, cluster: Cluster, choice: Choice, elements: int, places: Mapping[str, str]) -> None:
        self._cluster, self._choice, self._elements, self._places = cluster, choice, elements, places
        self._share = min(1.0, CHUNK_ELEMENTS / elements)
        """Of the first chunk in all of them."""
        members = len(choice.members)
        up = cost_model.payload_bytes(elements, choice.codec)
        down = codec_by_name(choice.codec).expected_reply_bytes(elements, members)
        self.flows = self._flows(up, down)
        self._carried = up + down if choice.engine == "mesh" else 2 * (members - 1) / members * (up + down)
        """Bytes that each member moves."""

    def _flows(self, up: float, down: float) -> dict[tuple[str, str], float]:
        places = [self._places[name] for name in self._choice.members]
        if self._choice.alone:
            return {}
        if self._choice.engine == "nccl":
            return cost_model.sharded_flows(places, up, down)
        return cost_model.star_flows(places, self._places[self._choice.hub], up, down)

    def exchange(self) -> Exchange:
        choice = self._choice
        if choice.alone:
            return Exchange((0.0,), cost_model.NOTHING, (), (0.0,))
        network = cost_model.slowest_part(self._cluster, self.flows)
        if choice.engine == "nccl":
            factor = cost_model.all_to_all_factor(len(choice.members))
            network = replace(network, seconds=network.seconds * factor)
        processes = self._processes()
        slowest = max(network, *processes.values(), key=lambda part: part.seconds)
        each = tuple(self._way(name, network, processes) for name in choice.members)
        moved: dict[str, float] = {}
        for ends, size in self.flows.items():
            for end in ends:
                moved[end] = moved.get(end, 0.0) + size
        work = tuple(self._taken(name) for name in choice.members)
        return Exchange(each, slowest, tuple(sorted(moved.items())), work)

    def _processes(self) -> dict[str, Bottleneck]:
        """Return how long the processes of each machine work: by member, those at the hub left out, and "" for the hub
        with them.

        A process has at most one core, and all of a machine have its cores between them.
        """
        choice, own = self._choice, self._own_work()
        crowd = Counter(self._places[name] for name in choice.members)
        found = {}
        for name in choice.members:
            if not self._at_hub(name):
                seconds = self._seconds(name, own, crowd[self._places[name]] * own)
                found[name] = Bottleneck("member", name, "", 8e-6 * self._carried / seconds, seconds)
        if choice.hub:
            hub = self._hub_work()
            seconds = self._seconds(choice.hub, hub, hub + crowd[self._places[choice.hub]] * own)
            rate = 8e-6 * len(choice.members) * self._carried / seconds
            found[""] = Bottleneck("hub", choice.hub, "", rate, seconds)
        return found

    def _at_hub(self, name: str) -> bool:
        return bool(self._choice.hub) and self._places[name] == self._places[self._choice.hub]

    def _seconds(self, name: str, one: float, together: float) -> float:
        """Return how long a machine needs for core seconds of its busiest process and of all of them."""
        cores = self._cluster.machine(name).cores
        return max(one / self._core(name), together / cores if cores else 0.0)

    def _way(self, name: str, network: Bottleneck, processes: Mapping[str, Bottleneck]) -> float:
        """Return how long a member's exchange takes: its slowest part, and what that part has nothing to do while the
        first chunk comes to it and the last one goes on through the others. The network of a hub is two parts, up and
        down, and none for who is on the hub's machine."""
        choice = self._choice
        parts = [processes[key].seconds for key in (name, "") if key in processes]
        core = min(self._core(name), self._core(choice.hub) if choice.hub else 1.0)
        fixed = cost_model.OPERATION[choice.engine] / core
        if not self._at_hub(name):
            links = (self._cluster.link(source, target) for source, target in self.flows)
            round_trip = max((link.rtt_ms / 1000 for link in links if link is not None), default=0.0)
            parts.append(network.seconds)
            fixed += round_trip + self._behind(network) * network.seconds
        return max(parts) + self._share * (sum(parts) - max(parts)) + fixed

    def _behind(self, network: Bottleneck) -> float:
        """Return how far, as a share, the way down from a hub is behind the way up."""
        if not self._choice.hub:
            return 0.0
        flows = sum(not self._at_hub(name) for name in self._choice.members)
        shared = network.kind in ("interface", "air")
        return self._share + (1.0 - self._share) * (cost_model.behind_by_uneven_flows(flows) if shared else 0.0)

    def _own_work(self) -> float:
        """Return the core seconds of a member; as an owner it decodes what the others send of its slice as well."""
        choice, decoded = self._choice, 1.0 if self._choice.engine == "mesh" else 2.0
        moving = cost_model.transfer(self._carried, cost_model.MEMBER_MBIT[choice.engine]) + self._frames(1)
        return moving + cost_model.codec_seconds(self._elements, choice.codec, 1.0, decoded)

    def _hub_work(self) -> float:
        """Return the core seconds of the hub, which decodes every member's vector and encodes the mean."""
        choice, members = self._choice, len(self._choice.members)
        slower = cost_model.FP32_HUB_MBIT / (self._cluster.machine(choice.hub).hub_mbit or cost_model.FP32_HUB_MBIT)
        moving = cost_model.transfer(members * self._carried, cost_model.HUB_MBIT) + self._frames(members)
        return slower * moving + cost_model.codec_seconds(self._elements, choice.codec, 1.0, members)

    def _frames(self, members: int) -> float:
        """Return the core seconds for the frames of so many members, up and down."""
        chunks = max(1.0, self._elements / CHUNK_ELEMENTS)
        return 2 * members * chunks * cost_model.FRAME if self._choice.engine == "mesh" else 0.0

    def _core(self, name: str) -> float:
        """Return how much of one core a process there has; one where it is unknown."""
        return min(1.0, self._cluster.machine(name).cores or 1.0)

    def _taken(self, name: str) -> float:
        """Return the compute that an exchange takes from a member, in seconds of all its cores."""
        machine = self._cluster.machine(name)
        if machine.device != "cpu" or not machine.cores:
            return 0.0
        return (self._own_work() + (self._hub_work() if self._at_hub(name) else 0.0)) / machine.cores
