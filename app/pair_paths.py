"""How the pairs of a run reach one another, in words: directly and over which address, or through the relay."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Callable, Iterator, Mapping

from app.member_state import MemberState
from training.events import PeerPath, WaysEvent

SHOWN = 3
"""Pairs that are named one by one; of more only those that are not direct are."""
_RELAY = "through the relay"


def pairs(members: Mapping[int, MemberState]) -> Iterator[tuple[int, int, PeerPath | None, PeerPath | None]]:
    """Yield the two ranks of each pair that has met, the way from the lower to the higher, and the one back."""
    for one, other in itertools.combinations(sorted(members), 2):
        there, back = members[one].ways.get(other), members[other].ways.get(one)
        if there is not None or back is not None:
            yield one, other, there, back


def way_words(way: PeerPath) -> str:
    """``through the relay``, or ``directly (10.0.0.2 over eth0)``."""
    if way.how == "relayed":
        return _RELAY
    over = f" over {way.interface}" if way.interface else ""
    small = ", in small packets: large ones are lost" if way.loses_large else ""
    return f"directly ({way.address}{over}{small})"


def pair_words(names: Callable[[int], str], one: int, other: int, there: PeerPath | None, back: PeerPath | None) -> str:
    """``studio - tower: directly (10.0.0.2 over eth0)``; both directions where they differ in kind."""
    ends = f"{names(one)} - {names(other)}"
    kinds = {way.how == "relayed" for way in (there, back) if way is not None}
    first = there or back
    assert first is not None
    if len(kinds) > 1 and there is not None and back is not None:
        return f"{ends}: {way_words(there)}, back {way_words(back)}"
    dials = {(there.how if there else "", back.how if back else "")} & {("dialled", "came"), ("came", "dialled")}
    only = f", {names(one if ('dialled', 'came') in dials else other)} opens both connections" if dials else ""
    return f"{ends}: {way_words(first)}{only}"


def pair_lines(members: Mapping[int, MemberState], names: Callable[[int], str], most: int = SHOWN) -> list[str]:
    """Return a line for each pair; with more than ``most`` of them one for all that are direct, and those that are not.

    Pairs on one machine are no way that anybody could choose, and are left out.
    """
    found = [pair for pair in pairs(members) if not all(way is None or is_near(way) for way in pair[2:])]
    if len(found) <= most:
        return [pair_words(names, *pair) for pair in found]
    helped = [pair for pair in found if any(way is not None and way.how == "relayed" for way in pair[2:])]
    shown = [pair_words(names, *pair) for pair in helped[:most]]
    left = [f"{len(helped) - most} more pairs {_RELAY}"] if len(helped) > most else []
    return [f"{len(found) - len(helped)} of {len(found)} pairs connect directly", *shown, *left]


def changes(event: WaysEvent, before: MemberState | None) -> str:
    """Return what has changed for whom; empty where a pair has met for the first time, or nothing did."""
    told = []
    if before is None:
        return ""
    for way in event.ways:
        old = before.ways.get(way.peer)
        if old is not None and way_words(old) != way_words(way):
            ends = f"{before.label} to {way.name or f'member {way.peer}'}"
            told.append(f"{ends}: now {way_words(way)}, before {way_words(old)}")
    return "; ".join(told)


def is_near(way: PeerPath) -> bool:
    """Whether a way does not leave its machine."""
    try:
        return ipaddress.ip_address(way.address).is_loopback
    except ValueError:
        return False
