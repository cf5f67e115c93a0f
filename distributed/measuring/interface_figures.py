"""What the network interface of a machine carries with several others at once.

A link between two machines is as fast as the slower of their interfaces. A hub among slow members has more to give than
any of its links shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from distributed.measuring.link_figures import PATIENCE, PairFigures, Probe, listening
from distributed.measuring.link_probe import MOST_PEERS
from distributed.planning.cluster import Document, Mbit, Name
from distributed.planning.cost_model import LINE_SHARE
from profiles.counts import counted
from profiles.errors import MusterError

_EXHAUSTED = 0.9
"""A link that carries so much of what the card can leaves nothing to be found out."""


_MORE = 1.3
"""Times a link's rate that the machine at its other end has to carry to have had more to give."""


class Together(Document):
    """What a probe says of several peers at once; it comes from another machine, so that every field has bounds."""

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
    """Measure, one after the other, the machines that could carry a hub and may carry more than their links show: those
    with the fastest links first, for they tell most of the others."""
    found: list[InterfaceFigures] = []
    for name in sorted(probes, key=lambda name: -max(map(_rate, _of(name, pairs)), default=0.0)):
        probe = probes[name]
        peers = telling_peers(name, pairs, probe.cards) if probe.may_carry_hub else []
        if not peers or known_slower(name, pairs, found):
            continue
        tell(f"{name}: measuring its network interface with {counted(len(peers), 'machine')} at once")
        with contextlib.suppress(MusterError, ValidationError):  # then its links have to do
            found.append(_measure(probe, [(probes[pair.other_end(name)], pair) for pair in peers]))
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


def _measure(probe: Probe, peers: Sequence[tuple[Probe, PairFigures]]) -> InterfaceFigures:
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
