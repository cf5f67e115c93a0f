"""The ways to train as a person is asked for one: Fast, Exact, One machine; the whole ranking is for who wants it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.wizard.records import RankedCandidate
from profiles.errors import counted

FAST, EXACT, BOTH, SINGLE = "Fast", "Exact", "Fast and exact", "One machine"
_ALIKE = 1.05
"""Times as fast, below which predictions cannot tell two ways apart."""


def offered(ways: Sequence[RankedCandidate], chosen: RankedCandidate | None) -> list[tuple[str, RankedCandidate]]:
    """Return what a person chooses from, each with its label, the best first; a chosen way is always there."""
    labels = _labels(ways)
    offer = [(labels[way.index], way) for way in ways if way.index in labels]
    if chosen is not None and chosen.index not in labels:
        offer.append((chosen.choice.name, chosen))
    return offer


def label_of(way: RankedCandidate, ways: Sequence[RankedCandidate]) -> str:
    """Return ``Fast``, ``Exact``, ``One machine``, or the name of a way that is none of these."""
    return SINGLE if way.choice.alone else _labels(ways).get(way.index, way.choice.name)


def _labels(ways: Sequence[RankedCandidate]) -> dict[int, str]:
    """Return the label by index in the ranking; ways that fit no memory have one where nothing else would."""
    groups = [way for way in ways if way.candidate.predicted and not way.choice.alone and not way.problem]
    groups = [way for way in groups if way.recommended or way.choice.engine != "nccl"]
    fastest = max(groups, key=lambda way: way.candidate.useful_speed_up, default=None)
    advised = next((way for way in groups if way.recommended), fastest)
    if fastest is not None and advised is not None and _speed(fastest) < _ALIKE * _speed(advised):
        fastest = advised
    exact = advised if advised is not None and advised.exact else next((way for way in groups if way.exact), None)
    labels = {way.index: way.choice.name for way in ways if not way.candidate.predicted}
    labels |= {} if exact is None else {exact.index: EXACT}
    if fastest is not None:
        labels[fastest.index] = BOTH if fastest is exact else FAST
    singles = [way for way in ways if way.choice.alone]
    single = next((way for way in singles if way.recommended), max(singles, key=_speed, default=None))
    return labels | ({} if single is None else {single.index: SINGLE})


def _speed(way: RankedCandidate) -> float:
    return 0.0 if way.problem else way.candidate.useful_speed_up


def advised(ways: Sequence[RankedCandidate], preference: str) -> RankedCandidate | None:
    """Return the way that is recommended with the figures as they are shown, after a person has moved an interval.

    ``None``: the recommended way was left for a worse interval of its own.
    """
    first = next((way for way in ways if way.recommended), None)
    moved = next((way for way in ways if way.interval != way.best_interval), None)
    if first is None or moved is None:
        return first
    needed = _ALIKE * _speed(first) if moved.index != first.index else moved.best_speed
    if preference == "fastest" and moved.acceptable and _speed(moved) >= needed:
        return moved
    return None if moved.index == first.index else first


def rhythm_text(way: RankedCandidate) -> str:
    """Return how often the machines merge what they have learnt; empty for one machine."""
    if way.choice.alone:
        return ""
    return f"merging every {counted(way.interval, 'step')}" if way.interval > 1 else "merging in every step"


def about(way: RankedCandidate) -> Iterator[str]:
    """Yield what a person should know of a way, in plain sentences."""
    if way.time is not None:
        yield from way.time.sentences
    elif not way.candidate.predicted:
        yield "How long it takes is not predicted: nothing is known of what it costs."
    else:
        yield "How long it takes was not measured."
    if way.quality:
        yield way.quality
