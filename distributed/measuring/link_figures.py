"""Measured throughput and latency of links, and throughput of network interfaces.

Every pair of machines is measured once, in rounds in which no machine takes part twice. A link between two machines is
as fast as the slower of their interfaces, so a fast machine among slow ones has more capacity than any of its links
shows: interfaces are therefore also measured with several peers at once.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from distributed.agent.link_probe import MOST_PEERS, TOKEN
from distributed.agent.requests import (
    ListAddresses,
    ListenForPeers,
    MachineRequest,
    MeasureLink,
    MeasureTogether,
    StopListening,
    frame,
)
from distributed.machine.link import HERE_NAME, MachineLink
from distributed.planning.cost_model import LINE_SHARE
from distributed.planning.documents.cluster import Document, Link, Mbit, Name, Text
from distributed.ssh.errors import SshError, one_line
from distributed.ssh.process import Process
from profiles.errors import MusterError, counted

MEASURE_TIMEOUT = 25.0
"""Seconds for one pair; a link of 1 Mbit/s takes 4 s."""
_COMMAND_TIMEOUT = 10.0
_THUNDERBOLT = ("thunderbolt", "bridge0")
"""Name prefixes of Thunderbolt interfaces on Linux and macOS."""
_BUSY_SHARE, _BUSY_MBIT = 0.05, 1.0

Milliseconds = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = tuple[str, str]


class LinkFigures(Document):
    """A probe's report on one pair of machines; it comes from another machine, so every field is bounded."""

    mbit: Mbit
    mbit_back: Mbit
    rtt_ms: Milliseconds
    jitter_ms: Milliseconds
    loss: Share
    """Share of bytes that TCP retransmitted; 0 where the system does not report it."""
    loss_back: Share
    interface: Text
    interface_back: Text
    wireless: bool
    wireless_back: bool
    other_mbit: Mbit
    """Other traffic on the interfaces during the measurement, in Mbit/s."""
    loses_large: bool = False
    """Only small packets get through, and the figures are for small packets."""
    address: Text
    paths: Annotated[tuple[tuple[Text, Text, Text, Mbit], ...], Field(max_length=8)]
    """Every path that answered: address, interface of the source, interface of the target, Mbit/s."""


STARTER_LABEL = "this computer"
"""This machine, where it does not train, as a person reads it."""


def is_starter(name: str) -> bool:
    """Whether a name among the links stands for this machine where it does not train."""
    return name.rstrip("'") == HERE_NAME


class PairFigures(Document):
    """Figures of one pair of machines, or the reason why there are none."""

    source: Name
    target: Name
    figures: LinkFigures | None = None
    problem: Text = ""
    only: bool = False
    """Whether only this direction can be dialled: the target could not dial the source."""

    def interface_of(self, name: str) -> str:
        """Return the network interface that one of the two machines uses on their best path."""
        if self.figures is None:
            return ""
        return self.figures.interface if name == self.source else self.figures.interface_back

    def other_end(self, name: str) -> str:
        """Return the name of the other machine."""
        return self.target if name == self.source else self.source

    def with_name_beside(self, peer: str, name: str) -> PairFigures:
        """Return the pair with another name of the machine that is not ``peer``; unchanged if neither is ``peer``."""
        if peer not in (self.source, self.target):
            return self
        return self.model_copy(update={"target" if peer == self.source else "source": name})

    @property
    def from_starter(self) -> bool:
        """Whether one of the two is this machine although it does not train: it starts the run, and may coordinate."""
        return is_starter(self.source) or is_starter(self.target)

    @property
    def labels(self) -> tuple[str, str]:
        """The names of the two as a person reads them."""
        source, target = (STARTER_LABEL if is_starter(name) else name for name in (self.source, self.target))
        return source, target

    @property
    def busy(self) -> bool:
        """Whether other traffic used so much of the link that the figures are too low."""
        figures = self.figures
        if figures is None:
            return False
        return figures.other_mbit > max(_BUSY_MBIT, _BUSY_SHARE * min(figures.mbit, figures.mbit_back))

    @property
    def link(self) -> Link:
        """The link as the planner expects it; 0 Mbit/s where the measurement failed."""
        figures = self.figures
        if figures is None:
            return Link(source=self.source, target=self.target, mbit=0, mbit_back=0)
        wireless = figures.wireless or figures.wireless_back
        return Link(
            source=self.source,
            target=self.target,
            **figures.model_dump(include={"mbit", "mbit_back", "rtt_ms", "jitter_ms"}),
            medium="wifi" if wireless else _medium(figures.interface, figures.interface_back),
            air="wifi" if wireless else "",
        )


def _medium(*interfaces: str) -> Literal["loopback", "thunderbolt", "ethernet", "unknown"]:
    if not all(interfaces):
        return "unknown"
    if all(name in ("lo", "lo0") for name in interfaces):
        return "loopback"
    return "thunderbolt" if all(name.startswith(_THUNDERBOLT) for name in interfaces) else "ethernet"


def rounds(names: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which every pair meets once: the circle method of round-robin tournaments.

    ``n`` names take ``n - 1`` rounds, ``n`` where that is odd.
    """
    ring: list[str | None] = list(names)
    if len(ring) % 2:
        ring.append(None)
    schedule = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        schedule.append([(left, right) for left, right in pairs if left is not None and right is not None])
        ring[1:] = [ring[-1], *ring[1:-1]]
    return schedule


class Probe:
    """The link probe on one machine, as a context manager."""

    def __init__(self, link: MachineLink) -> None:
        self.name = link.name
        self._link = link
        self._process: Process | None = None
        self.addresses: list[str] = []
        self.cards: dict[str, float] = {}
        """Line rates of its interfaces in Mbit/s, where its system reports them."""

    @property
    def can_be_dialled(self) -> bool:
        """Whether other machines can dial it."""
        return self._link.machine.is_local or bool(self._link.host)

    def __enter__(self) -> Probe:
        self._process = self._link.stream(ListAddresses())
        try:
            reply = self._reply(_COMMAND_TIMEOUT)
            addresses = [(str(name), str(address)) for name, address in reply["addresses"]]
            reachable = [address for name, address in addresses if _reaches_others(name, address)]
            self.cards = {str(name): float(rate) for name, rate in dict(reply["cards"]).items()}
        except (KeyError, TypeError, ValueError):
            self.__exit__()
            raise SshError(self.name, "its link probe sent no list of addresses") from None
        except BaseException:
            self.__exit__()
            raise
        self.addresses = list(dict.fromkeys([*filter(None, [self._link.host]), *reachable]))[:8]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(MusterError, OSError):
                self._process.end_input()
                self._process.wait(_COMMAND_TIMEOUT)
            self._process.close()

    def ask(self, request: MachineRequest, timeout: float) -> dict[str, Any]:
        """Send one request and return the reply.

        Raises:
            SshError: the probe ended, timed out, sent something else than a reply, or could not carry out the request.
        """
        assert self._process is not None
        self._process.write(frame(request))
        return self._reply(timeout)

    def _reply(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None
        try:
            reply = json.loads(self._process.read_line(timeout))
        except TimeoutError:
            raise SshError(self.name, "its link probe did not answer in time") from None
        except ValueError:
            last_words = self._process.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise SshError(self.name, f"its link probe ended ({' '.join(last_words) or 'no message'})") from None
        if isinstance(reply, dict) and "error" not in reply:
            return reply
        raise SshError(self.name, str(reply["error"]) if isinstance(reply, dict) else "its link probe failed")


def _reaches_others(interface: str, address: str) -> bool:
    """Whether others can dial an address; a link-local IPv6 one needs a scope that only the dialling side knows."""
    local_prefixes = ("127.", "::1", "fe80:", "172.17.")
    virtual_interfaces = ("docker", "br-", "veth", "virbr")
    return not address.lower().startswith(local_prefixes) and not interface.startswith(virtual_interfaces)


@contextlib.contextmanager
def probing(links: Sequence[MachineLink]) -> Iterator[dict[str, Probe]]:
    """Run the link probe on machines for the duration of the context; yields the probes by machine name.

    Raises:
        SshError: a machine cannot run it.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max(1, len(links))) as pool:
        yield {probe.name: probe for probe in pool.map(stack.enter_context, [Probe(link) for link in links])}


def measure_links(
    probes: Mapping[str, Probe], tell: Callable[[PairFigures], None], already_measured: Collection[frozenset[str]] = ()
) -> list[PairFigures]:
    """Measure every pair of machines in both directions, unless ``already_measured``; ``tell`` gets each result."""
    measured = []
    with ThreadPoolExecutor(max(1, len(probes))) as pool:
        for pairs in rounds(list(probes)):
            missing = [pair for pair in pairs if frozenset(pair) not in already_measured]
            for pair_figures in pool.map(lambda pair: _measure(probes[pair[0]], probes[pair[1]]), missing):
                measured.append(pair_figures)
                tell(pair_figures)
    return measured


def _measure(source: Probe, target: Probe) -> PairFigures:
    """Measure one pair, in whichever direction it can be dialled: a firewall may allow only one."""
    try:
        return PairFigures(source=source.name, target=target.name, figures=_call(source, target))
    except MusterError as error:
        try:
            return PairFigures(source=target.name, target=source.name, figures=_call(target, source), only=True)
        except MusterError:
            return PairFigures(source=source.name, target=target.name, problem=one_line(error.message)[:300])


def _call(source: Probe, target: Probe) -> LinkFigures:
    with listening(target) as (port, token):
        try:
            return LinkFigures.model_validate(source.ask(MeasureLink(target.addresses, port, token), MEASURE_TIMEOUT))
        except ValidationError:
            raise SshError(source.name, f"measured impossible values towards {target.name}") from None


@contextlib.contextmanager
def listening(probe: Probe) -> Iterator[tuple[int, str]]:
    """Make a probe listen for the duration of the context; yields its port and token.

    Raises:
        SshError: it cannot.
    """
    token = secrets.token_hex(TOKEN // 2)
    try:
        yield int(probe.ask(ListenForPeers(token), _COMMAND_TIMEOUT)["port"]), token
    except (KeyError, TypeError, ValueError):
        raise SshError(probe.name, "its link probe sent no port") from None
    finally:
        with contextlib.suppress(MusterError):
            probe.ask(StopListening(), _COMMAND_TIMEOUT)


_EXHAUSTED = 0.9
"""Share of its card's rate from which one link alone shows what the interface carries."""
_HEADROOM = 1.3
"""Factor over a link's rate that the machine at its other end must carry for that link not to be limited by it."""


class Together(Document):
    """A probe's report on several peers at once; it comes from another machine, so every field is bounded."""

    mbit: Mbit
    """Total rate to all peers."""
    mbit_back: Mbit
    """Total rate from all peers."""
    peers: Annotated[int, Field(ge=2, le=MOST_PEERS)]


class InterfaceFigures(Together):
    """What the network interface of one machine carries with several peers at once."""

    machine: Name

    @property
    def each_way(self) -> float:
        """Mbit/s in the slower direction."""
        return min(self.mbit, self.mbit_back)


class AllInterfaces(Document):
    """Interface figures of a group of machines; a machine without an entry carries no more than its fastest link."""

    figures: Annotated[tuple[InterfaceFigures, ...], Field(max_length=64)] = ()

    def with_other_name(self, name: str, names: Collection[str]) -> AllInterfaces:
        """Return the figures with ``name`` for a machine that is not among ``names``."""
        changes = [{} if one.machine in names else {"machine": name} for one in self.figures]
        return AllInterfaces(figures=tuple(map(lambda one, new: one.model_copy(update=new), self.figures, changes)))


def measure_interfaces(
    probes: Mapping[str, Probe], pairs: Sequence[PairFigures], tell: Callable[[str], None]
) -> AllInterfaces:
    """Measure, one after the other, the machines that can be dialled and may carry more than their links show.

    Machines with the fastest links come first, because their figures tell most about the others.
    """
    figures: list[InterfaceFigures] = []
    for name in sorted(probes, key=lambda name: -max(map(_rate, _usable_links_of(name, pairs)), default=0.0)):
        probe = probes[name]
        peers = saturating_peers(name, pairs, probe.cards) if probe.can_be_dialled else []
        if not peers or known_slower(name, pairs, figures):
            continue
        label = STARTER_LABEL if is_starter(name) else name
        tell(f"{label}: measuring its network interface with {counted(len(peers), 'machine')} at once")
        with contextlib.suppress(MusterError, ValidationError):  # the figures of its links are used instead
            figures.append(_measure_together(probe, [(probes[pair.other_end(name)], pair) for pair in peers]))
    return AllInterfaces(figures=tuple(figures))


def saturating_peers(name: str, pairs: Sequence[PairFigures], cards: Mapping[str, float]) -> list[PairFigures]:
    """Return the links of a machine that together show what its interface carries: its fastest ones, up to the rate of
    its card; empty where one link alone shows it, or there is only one.

    Args:
        cards: line rates of its interfaces in Mbit/s, where they are known.
    """
    wired = (pair for pair in _usable_links_of(name, pairs) if not pair.link.air and pair.link.medium != "loopback")
    by_rate = sorted(wired, key=_rate, reverse=True)[:MOST_PEERS]
    interfaces = {pair.interface_of(name) for pair in by_rate}
    rates = [LINE_SHARE * cards.get(interface, 0.0) for interface in interfaces]
    capacity = sum(rates) if all(rates) else float("inf")
    if len(by_rate) < 2 or _rate(by_rate[0]) >= _EXHAUSTED * capacity:
        return []
    filled = (number for number in range(2, len(by_rate)) if sum(map(_rate, by_rate[:number])) >= capacity)
    return by_rate[: next(filled, len(by_rate))]


def known_slower(name: str, pairs: Sequence[PairFigures], measured: Sequence[InterfaceFigures]) -> bool:
    """Whether one of a machine's fastest links leads to a machine that carried much more with several peers at once, so
    that this machine is the slower end."""
    links = _usable_links_of(name, pairs)
    fastest = max(map(_rate, links))
    proven_rates = {figures.machine: figures.each_way for figures in measured}
    fastest_links = (pair for pair in links if _rate(pair) > _EXHAUSTED * fastest)
    return any(proven_rates.get(pair.other_end(name), 0.0) > _HEADROOM * fastest for pair in fastest_links)


def _usable_links_of(name: str, pairs: Sequence[PairFigures]) -> list[PairFigures]:
    return [pair for pair in pairs if name in (pair.source, pair.target) and pair.link.usable]


def _rate(pair: PairFigures) -> float:
    return max(pair.link.mbit, pair.link.mbit_back)


def _measure_together(probe: Probe, peers: Sequence[tuple[Probe, PairFigures]]) -> InterfaceFigures:
    with contextlib.ExitStack() as stack:
        peer_requests: list[dict[str, Any]] = []
        for peer, pair in peers:
            port, token = stack.enter_context(listening(peer))
            has_dialled = pair.figures is not None and pair.source == probe.name
            addresses = [pair.figures.address] if has_dialled and pair.figures is not None else peer.addresses
            ends = [pair.interface_of(probe.name), pair.interface_of(peer.name)]
            peer_requests.append({"addresses": addresses, "port": port, "token": token, "ends": ends})
        report = Together.model_validate(probe.ask(MeasureTogether(peer_requests), MEASURE_TIMEOUT))
    return InterfaceFigures(machine=probe.name, **report.model_dump())
