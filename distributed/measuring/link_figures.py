"""What links and interfaces carry, measured.

Every pair of machines is measured once, in rounds in which no machine takes part twice. A link between two machines is
as fast as the slower of their interfaces, and a fast machine among slow ones has more to give than any of its links
shows: so interfaces are measured with several others at once.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from distributed.machine.link import MachineLink, packed
from distributed.measuring.link_probe import MOST_PEERS, TOKEN
from distributed.planning.cluster import Document, Link, Mbit, Name, Text
from distributed.planning.cost_model import LINE_SHARE
from distributed.ssh.errors import SshError, one_line
from distributed.ssh.process import Process
from profiles.errors import MusterError, counted

PATIENCE = 25.0
"""Seconds for one pair; a link of 1 Mbit/s takes 4."""
_SHORT_PATIENCE = 10.0
PROBE_MODULES = ("distributed.system", "distributed.measuring.link_transfer", "distributed.measuring.link_probe")
_THUNDERBOLT = ("thunderbolt", "bridge0")
"""As Linux and macOS call it."""
_BUSY_SHARE, _BUSY_MBIT = 0.05, 1.0

Milliseconds = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = tuple[str, str]


class LinkFigures(Document):
    """A probe's report on one pair of machines; it comes from another machine, so every field has bounds."""

    mbit: Mbit
    mbit_back: Mbit
    rtt_ms: Milliseconds
    jitter_ms: Milliseconds
    loss: Share
    """Bytes that TCP had to send again, as a share; 0 where the system does not tell."""
    loss_back: Share
    interface: Text
    interface_back: Text
    wireless: bool
    wireless_back: bool
    other_mbit: Mbit
    """Traffic of others on the interfaces meanwhile."""
    loses_large: bool = False
    """Only small packets pass, and the figures are those of small ones."""
    address: Text
    paths: Annotated[tuple[tuple[Text, Text, Text, Mbit], ...], Field(max_length=8)]
    """Every way that was found: address, interface here, interface there, Mbit/s."""


class PairFigures(Document):
    """One pair of machines: figures, or why there are none."""

    source: Name
    target: Name
    figures: LinkFigures | None = None
    problem: Text = ""
    only: bool = False
    """Whether the target could not dial the source."""

    def interface_of(self, name: str) -> str:
        """Return the network interface of one of the two on their best way."""
        if self.figures is None:
            return ""
        return self.figures.interface if name == self.source else self.figures.interface_back

    def other_end(self, name: str) -> str:
        """Return the name of the other machine."""
        return self.target if name == self.source else self.source

    @property
    def busy(self) -> bool:
        """Whether other traffic used so much of the link that the figures are too low."""
        found = self.figures
        return found is not None and found.other_mbit > max(_BUSY_MBIT, _BUSY_SHARE * min(found.mbit, found.mbit_back))

    @property
    def link(self) -> Link:
        """The link as the planner takes it; 0 Mbit/s where nothing passed."""
        found = self.figures
        if found is None:
            return Link(source=self.source, target=self.target, mbit=0, mbit_back=0)
        wireless = found.wireless or found.wireless_back
        return Link(
            source=self.source,
            target=self.target,
            **found.model_dump(include={"mbit", "mbit_back", "rtt_ms", "jitter_ms"}),
            medium="wifi" if wireless else _medium(found.interface, found.interface_back),
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
    found = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        ring[1:] = [ring[-1], *ring[1:-1]]
    return found


class Probe:
    """The link probe on one machine, as a context manager."""

    def __init__(self, link: MachineLink) -> None:
        self.name = link.name
        self._link = link
        self._process: Process | None = None
        self.addresses: list[str] = []
        self.cards: dict[str, float] = {}
        """Line rates of its interfaces in Mbit/s, where its system tells them."""

    @property
    def can_be_dialled(self) -> bool:
        """Whether others can dial it."""
        return self._link.machine.here or bool(self._link.host)

    def __enter__(self) -> Probe:
        self._process = self._link.connection().stream(
            [self._link.python, "-c", packed(*PROBE_MODULES), "muster-link-probe"]
        )
        try:
            own = self.ask({"op": "addresses"}, _SHORT_PATIENCE)
            listed = [str(address) for name, address in own["addresses"] if _reaches_others(str(name), str(address))]
            self.cards = {str(name): float(rate) for name, rate in dict(own["cards"]).items()}
        except (KeyError, TypeError, ValueError):
            self.__exit__()
            raise SshError(self.name, "its link probe sent no list of addresses") from None
        except BaseException:
            self.__exit__()
            raise
        self.addresses = list(dict.fromkeys([*filter(None, [self._link.host]), *listed]))[:8]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(MusterError, OSError):
                self._process.end_input()
                self._process.wait(_SHORT_PATIENCE)
            self._process.close()

    def ask(self, order: dict[str, Any], patience: float) -> dict[str, Any]:
        """Send one command and return the answer.

        Raises:
            SshError: the probe ended, is silent, says something else, or could not carry the order out.
        """
        assert self._process is not None
        try:
            self._process.write(json.dumps(order).encode() + b"\n")
            found = json.loads(self._process.read_line(patience))
        except TimeoutError:
            raise SshError(self.name, f"its link probe has not answered for {patience:.0f} s") from None
        except ValueError:
            said = self._process.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise SshError(self.name, f"its link probe ended ({' '.join(said) or 'no message'})") from None
        if not isinstance(found, dict) or "error" in found:
            raise SshError(self.name, str(found.get("error")) if isinstance(found, dict) else "its link probe failed")
        return found


def _reaches_others(interface: str, address: str) -> bool:
    """Link-local IPv6 addresses need a scope that only the other side knows."""
    own = ("127.", "::1", "fe80:", "172.17.")
    return not address.lower().startswith(own) and not interface.startswith(("docker", "br-", "veth", "virbr"))


@contextlib.contextmanager
def probing(links: Sequence[MachineLink]) -> Iterator[dict[str, Probe]]:
    """Start the link probe on machines; it ends with the context.

    Raises:
        SshError: a machine cannot run it.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max(1, len(links))) as pool:
        yield {probe.name: probe for probe in pool.map(stack.enter_context, [Probe(link) for link in links])}


def measure_links(
    probes: Mapping[str, Probe], tell: Callable[[PairFigures], None], known: Collection[frozenset[str]] = ()
) -> list[PairFigures]:
    """Measure every pair of machines in both directions but the known ones; ``tell`` hears of each as it is done."""
    found = []
    with ThreadPoolExecutor(max(1, len(probes))) as pool:
        for pairs in rounds(list(probes)):
            wanted = [pair for pair in pairs if frozenset(pair) not in known]
            for done in pool.map(lambda pair: _measure(probes[pair[0]], probes[pair[1]]), wanted):
                found.append(done)
                tell(done)
    return found


def _measure(source: Probe, target: Probe) -> PairFigures:
    """Measure one pair; a firewall may let only one of the two be called."""
    try:
        return PairFigures(source=source.name, target=target.name, figures=_call(source, target))
    except MusterError as first:
        try:
            return PairFigures(source=target.name, target=source.name, figures=_call(target, source), only=True)
        except MusterError:
            return PairFigures(source=source.name, target=target.name, problem=one_line(first.message)[:300])


def _call(source: Probe, target: Probe) -> LinkFigures:
    with listening(target) as (port, token):
        order = {"op": "measure", "addresses": target.addresses, "port": port, "token": token}
        try:
            return LinkFigures.model_validate(source.ask(order, PATIENCE))
        except ValidationError:
            raise SshError(source.name, f"measured impossible values towards {target.name}") from None


@contextlib.contextmanager
def listening(probe: Probe) -> Iterator[tuple[int, str]]:
    """Have a probe listen; yields its port and token.

    Raises:
        SshError: it cannot.
    """
    token = secrets.token_hex(TOKEN // 2)
    try:
        yield int(probe.ask({"op": "listen", "token": token}, _SHORT_PATIENCE)["port"]), token
    except (KeyError, TypeError, ValueError):
        raise SshError(probe.name, "its link probe sent no port") from None
    finally:
        with contextlib.suppress(MusterError):
            probe.ask({"op": "unlisten"}, _SHORT_PATIENCE)


_EXHAUSTED = 0.9
"""A link that carries so much of what the card can leaves nothing to be found out."""
_MORE = 1.3
"""Times a link's rate that the machine at its other end has to carry to have had more to give."""


class Together(Document):
    """A probe's report on several peers at once; it comes from another machine, so every field has bounds."""

    mbit: Mbit
    """To all of them."""
    mbit_back: Mbit
    """From all of them."""
    peers: Annotated[int, Field(ge=2, le=MOST_PEERS)]


class InterfaceFigures(Together):
    """One machine."""

    machine: Name

    @property
    def each_way(self) -> float:
        """Mbit/s in the slower direction."""
        return min(self.mbit, self.mbit_back)


class AllInterfaces(Document):
    """Of a group of machines; one that is missing carries no more than its fastest link."""

    figures: Annotated[tuple[InterfaceFigures, ...], Field(max_length=64)] = ()


def measure_interfaces(
    probes: Mapping[str, Probe], pairs: Sequence[PairFigures], tell: Callable[[str], None]
) -> AllInterfaces:
    """Measure, one after the other, those that can be dialled and may carry more than their links show: those with the
    fastest links first, for they tell most of the others."""
    found: list[InterfaceFigures] = []
    for name in sorted(probes, key=lambda name: -max(map(_rate, _of(name, pairs)), default=0.0)):
        probe = probes[name]
        peers = telling_peers(name, pairs, probe.cards) if probe.can_be_dialled else []
        if not peers or known_slower(name, pairs, found):
            continue
        tell(f"{name}: measuring its network interface with {counted(len(peers), 'machine')} at once")
        with contextlib.suppress(MusterError, ValidationError):  # then its links have to do
            found.append(_measure_together(probe, [(probes[pair.other_end(name)], pair) for pair in peers]))
    return AllInterfaces(figures=tuple(found))


def telling_peers(name: str, pairs: Sequence[PairFigures], cards: Mapping[str, float]) -> list[PairFigures]:
    """Return the links of a machine that together tell what its interface carries: the fastest, until they would fill
    its card. None where one link alone tells it, or there is only one.

    Args:
        cards: line rates of its interfaces, where they are known.
    """
    wired = (pair for pair in _of(name, pairs) if not pair.link.air and pair.link.medium != "loopback")
    own = sorted(wired, key=_rate, reverse=True)[:MOST_PEERS]
    interfaces = {pair.interface_of(name) for pair in own}
    rates = [LINE_SHARE * cards.get(interface, 0.0) for interface in interfaces]
    room = sum(rates) if all(rates) else float("inf")
    if len(own) < 2 or _rate(own[0]) >= _EXHAUSTED * room:
        return []
    filled = (number for number in range(2, len(own)) if sum(map(_rate, own[:number])) >= room)
    return own[: next(filled, len(own))]


def known_slower(name: str, pairs: Sequence[PairFigures], found: Sequence[InterfaceFigures]) -> bool:
    """Whether one of a machine's fastest links leads to another that carried much more with several at once: then the
    limit is not at that end."""
    own = _of(name, pairs)
    fastest = max(map(_rate, own))
    proved = {one.machine: one.each_way for one in found}
    near = (pair for pair in own if _rate(pair) > _EXHAUSTED * fastest)
    return any(proved.get(pair.other_end(name), 0.0) > _MORE * fastest for pair in near)


def _of(name: str, pairs: Sequence[PairFigures]) -> list[PairFigures]:
    return [pair for pair in pairs if name in (pair.source, pair.target) and pair.link.usable]


def _rate(pair: PairFigures) -> float:
    return max(pair.link.mbit, pair.link.mbit_back)


def _measure_together(probe: Probe, peers: Sequence[tuple[Probe, PairFigures]]) -> InterfaceFigures:
    with contextlib.ExitStack() as stack:
        called: list[dict[str, Any]] = []
        for peer, pair in peers:
            port, token = stack.enter_context(listening(peer))
            known = pair.figures is not None and pair.source == probe.name
            addresses = [pair.figures.address] if known and pair.figures is not None else peer.addresses
            ends = [pair.interface_of(probe.name), pair.interface_of(peer.name)]
            called.append({"addresses": addresses, "port": port, "token": token, "ends": ends})
        found = Together.model_validate(probe.ask({"op": "together", "peers": called}, PATIENCE))
    return InterfaceFigures(machine=probe.name, **found.model_dump())
