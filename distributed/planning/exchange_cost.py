"""What one exchange of a group costs on the links and machines that it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributed.planning import cost_model
from distributed.planning.cluster import Cluster
from distributed.planning.corrections import NONE, Corrections
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

    def __init__(self, cluster: Cluster, trainable: int, corrections: Corrections = NONE) -> None:
        self._corrections = corrections
        self._cluster = cluster
        self._trainable = trainable
        self._known: dict[tuple[object, ...], Exchange] = {}
        self.places = {m.name: min(o.name for o in cluster.machines if o.host == m.host) for m in cluster.machines}
        """The name that stands for the machine of an entry, by the entry's: entries may share one."""

    def _elements(self, choice: Choice) -> int:
        """Return how many parameters an exchange carries."""
        costs = strategy_costs(choice.strategy)
        return max(1, costs.elements(self._trainable)) if costs is not None else self._trainable

    def linked(self, choice: Choice) -> bool:
        """Whether everything that has to talk to each other can."""
        return all(self._cluster.link(one, other) is not None for one, other in self._flows(choice, 1.0, 1.0))

    def _flows(self, choice: Choice, up: float, down: float) -> dict[tuple[str, str], float]:
        places = [self.places[name] for name in choice.members]
        if choice.alone:
            return {}
        if choice.engine == "torch":
            return cost_model.sharded_flows(places, up, down)
        return cost_model.star_flows(places, self.places[choice.hub], up, down)

    def of(self, choice: Choice) -> Exchange:
        """Return time and traffic of one exchange of a group whose members are linked."""
        key = (choice.members, choice.strategy, choice.engine, choice.hub, choice.codec)
        if key not in self._known:
            found = self._exchange(choice)
            factor = self._corrections.exchange_of(choice.members, choice.strategy, choice.engine)
            self._known[key] = replace(found, each=tuple(factor * one for one in found.each), correction=factor)
        return self._known[key]

    def _exchange(self, choice: Choice) -> Exchange:
        if choice.alone:
            return Exchange((0.0,), cost_model.NOTHING, (), (0.0,))
        members, elements = len(choice.members), self._elements(choice)
        up = cost_model.payload_bytes(elements, choice.codec)
        down = codec_by_name(choice.codec).expected_reply_bytes(elements, members)
        flows = self._flows(choice, up, down)
        carried = up + down if choice.engine == "hub" else 2 * (members - 1) / members * (up + down)
        network = cost_model.slowest_part(self._cluster, flows)
        if choice.engine == "torch":
            network = replace(network, seconds=network.seconds * cost_model.all_to_all_factor(members))
        processes = self._processes(choice, carried)
        slowest = max(network, *processes.values(), key=lambda part: part.seconds)
        links = (self._cluster.link(source, target) for source, target in flows)
        round_trip = max((link.rtt_ms / 1000 for link in links if link is not None), default=0.0)
        behind = self._behind(choice, network)
        each = tuple(self._way(choice, name, network, processes, round_trip, behind) for name in choice.members)
        moved: dict[str, float] = {}
        for ends, size in flows.items():
            for end in ends:
                moved[end] = moved.get(end, 0.0) + size
        work = tuple(self._taken(choice, name, carried) for name in choice.members)
        return Exchange(each, slowest, tuple(sorted(moved.items())), work)

    def _processes(self, choice: Choice, carried: float) -> dict[str, Bottleneck]:
        """Return how long the processes of each machine work on an exchange of which each member carries so much: by
        member, those at the hub left out, and "" for the hub with them.

        A process has at most one core, and all of a machine have its cores between them.
        """
        own = self._own_work(choice, carried)
        crowd = Counter(self.places[name] for name in choice.members)
        found = {}
        for name in choice.members:
            if not self._at_hub(choice, name):
                seconds = self._seconds(name, own, crowd[self.places[name]] * own)
                found[name] = Bottleneck("member", name, "", 8e-6 * carried / seconds, seconds)
        if choice.hub:
            hub = self._hub_work(choice, carried)
            seconds = self._seconds(choice.hub, hub, hub + crowd[self.places[choice.hub]] * own)
            found[""] = Bottleneck("hub", choice.hub, "", 8e-6 * len(choice.members) * carried / seconds, seconds)
        return found

    def _at_hub(self, choice: Choice, name: str) -> bool:
        return bool(choice.hub) and self.places[name] == self.places[choice.hub]

    def _seconds(self, name: str, one: float, together: float) -> float:
        """Return how long a machine needs for core seconds of its busiest process and of all of them."""
        cores = self._cluster.machine(name).cores
        return max(one / self._core(name), together / cores if cores else 0.0)

    def _way(
        self,
        choice: Choice,
        name: str,
        network: Bottleneck,
        processes: Mapping[str, Bottleneck],
        round_trip: float,
        behind: float,
    ) -> float:
        """Return how long a member's exchange takes: its slowest part, and what that part has nothing to do while the
        first chunk comes to it and the last one goes on through the others. The network of a hub is two parts, up and
        down, and none for who is on the hub's machine."""
        share = min(1.0, CHUNK_ELEMENTS / self._elements(choice))
        parts = [processes[key].seconds for key in (name, "") if key in processes]
        core = min(self._core(name), self._core(choice.hub) if choice.hub else 1.0)
        fixed = cost_model.OPERATION[choice.engine] / core
        if not self._at_hub(choice, name):
            parts.append(network.seconds)
            fixed += round_trip + behind * network.seconds
        return max(parts) + share * (sum(parts) - max(parts)) + fixed

    def _behind(self, choice: Choice, network: Bottleneck) -> float:
        """Return how far, as a share, the way down from a hub is behind the way up."""
        if not choice.hub:
            return 0.0
        share = min(1.0, CHUNK_ELEMENTS / self._elements(choice))
        flows = sum(not self._at_hub(choice, name) for name in choice.members)
        shared = network.kind in ("interface", "air")
        return share + (1.0 - share) * (cost_model.behind_by_uneven_flows(flows) if shared else 0.0)

    def _own_work(self, choice: Choice, carried: float) -> float:
        """Return the core seconds of a member; as an owner it decodes what the others send of its slice as well."""
        decoded = 1.0 if choice.engine == "hub" else 2.0
        moving = cost_model.transfer(carried, cost_model.MEMBER_MBIT[choice.engine]) + self._frames(choice, 1)
        return moving + cost_model.codec_seconds(self._elements(choice), choice.codec, 1.0, decoded)

    def _hub_work(self, choice: Choice, carried: float) -> float:
        """Return the core seconds of the hub, which decodes every member's vector and encodes the mean."""
        members = len(choice.members)
        slower = cost_model.FP32_HUB_MBIT / (self._cluster.machine(choice.hub).hub_mbit or cost_model.FP32_HUB_MBIT)
        moving = cost_model.transfer(members * carried, cost_model.HUB_MBIT) + self._frames(choice, members)
        return slower * moving + cost_model.codec_seconds(self._elements(choice), choice.codec, 1.0, members)

    def _frames(self, choice: Choice, members: int) -> float:
        """Return the core seconds for the frames of so many members, up and down."""
        chunks = max(1.0, self._elements(choice) / CHUNK_ELEMENTS)
        return 2 * members * chunks * cost_model.FRAME if choice.engine == "hub" else 0.0

    def _core(self, name: str) -> float:
        """Return how much of one core a process there has; one where it is unknown."""
        return min(1.0, self._cluster.machine(name).cores or 1.0)

    def _taken(self, choice: Choice, name: str, carried: float) -> float:
        """Return the compute that an exchange takes from a member, in seconds of all its cores."""
        machine = self._cluster.machine(name)
        if machine.device != "cpu" or not machine.cores:
            return 0.0
        own = self._own_work(choice, carried)
        if choice.hub and self._cluster.on_one_machine((name, choice.hub)):
            own += self._hub_work(choice, carried)
        return own / machine.cores
