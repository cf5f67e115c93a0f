"""Texts of the routes between the pairs of members: direct with address, or through the relay."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Callable, Iterator, Mapping

from app.run_view.member_state import TROUBLE, MemberState
from training.records.events import PeerPath, WaysEvent

SHOWN = 3
"""Most pairs that are listed one by one; of more, only the relayed ones are listed."""
_RELAY = "through the relay"


def pairs(members: Mapping[int, MemberState]) -> Iterator[tuple[int, int, PeerPath | None, PeerPath | None]]:
    """Yield lower and higher rank of each connected pair, the route from the lower to the higher, and the one back."""
    for rank, peer in itertools.combinations(sorted(members), 2):
        forward, backward = members[rank].routes.get(peer), members[peer].routes.get(rank)
        if forward is not None or backward is not None:
            yield rank, peer, forward, backward


def route_text(route: PeerPath) -> str:
    """Return ``through the relay``, or ``directly (10.0.0.2 over eth0)``."""
    if route.how == "relayed":
        return _RELAY
    over = f" over {route.interface}" if route.interface else ""
    small = ", in small packets: large ones are lost" if route.loses_large else ""
    return f"directly ({route.address}{over}{small})"


def pair_text(
    names: Callable[[int], str], rank: int, peer: int, forward: PeerPath | None, backward: PeerPath | None
) -> str:
    """Return ``studio - tower: directly (10.0.0.2 over eth0)``; both directions where they differ in kind."""
    ends = f"{names(rank)} - {names(peer)}"
    kinds = {route.how == "relayed" for route in (forward, backward) if route is not None}
    either = forward or backward
    assert either is not None
    if len(kinds) > 1 and forward is not None and backward is not None:
        return f"{ends}: {route_text(forward)}, back {route_text(backward)}"
    dials = {(forward.how if forward else "", backward.how if backward else "")} & {
        ("dialled", "came"),
        ("came", "dialled"),
    }
    only = f", {names(rank if ('dialled', 'came') in dials else peer)} opens both connections" if dials else ""
    return f"{ends}: {route_text(either)}{only}"


def pair_lines(members: Mapping[int, MemberState], names: Callable[[int], str], limit: int = SHOWN) -> list[str]:
    """Return one line a pair; above ``limit`` pairs, a count of the direct ones and the first relayed ones.

    Pairs on one machine are left out, whose route cannot be chosen, and those of a machine that is lost.
    """
    present = {rank: member for rank, member in members.items() if member.status not in TROUBLE}
    remote_pairs = [
        pair for pair in pairs(present) if not all(route is None or is_loopback(route) for route in pair[2:])
    ]
    if len(remote_pairs) <= limit:
        return [pair_text(names, *pair) for pair in remote_pairs]
    relayed = [pair for pair in remote_pairs if any(route is not None and route.how == "relayed" for route in pair[2:])]
    shown = [pair_text(names, *pair) for pair in relayed[:limit]]
    omitted = [f"{len(relayed) - limit} more pairs {_RELAY}"] if len(relayed) > limit else []
    return [f"{len(remote_pairs) - len(relayed)} of {len(remote_pairs)} pairs connect directly", *shown, *omitted]


def route_changes(event: WaysEvent, before: MemberState | None) -> str:
    """Return the text of changed routes; empty where none changed, or pairs met for the first time."""
    texts = []
    if before is None:
        return ""
    for route in event.ways:
        old = before.routes.get(route.peer)
        if old is not None and route_text(old) != route_text(route):
            ends = f"{before.label} to {route.name or f'member {route.peer}'}"
            texts.append(f"{ends}: now {route_text(route)}, before {route_text(old)}")
    return "; ".join(texts)


def is_loopback(route: PeerPath) -> bool:
    """Whether a route stays on its machine."""
    try:
        return ipaddress.ip_address(route.address).is_loopback
    except ValueError:
        return False
