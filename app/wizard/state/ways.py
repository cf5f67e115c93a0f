"""The few candidate plans offered by default (Fast, Exact, One machine), and their descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from app.wizard.state.records import CandidateRow
from profiles.errors import BadInput, counted

if TYPE_CHECKING:  # pydantic, which the first screen does without
    from training.records.plan import RunPlan

FAST, EXACT, BOTH, SINGLE, DIVIDED = "Fast", "Exact", "Fast and exact", "One machine", "Divided model"
_ALIKE = 1.05
"""Speed ratio below which predictions cannot tell two candidate plans apart."""


def offered(candidates: Sequence[CandidateRow], chosen: CandidateRow | None) -> list[tuple[str, CandidateRow]]:
    """Return the offered candidate plans with their labels, best first; the chosen one is always included."""
    labels = _labels(candidates)
    offer = [(labels[way.index], way) for way in candidates if way.index in labels]
    if chosen is not None and chosen.index not in labels:
        offer.append((chosen.choice.name, chosen))
    return offer


def label_of(candidate: CandidateRow, candidates: Sequence[CandidateRow]) -> str:
    """Return ``Fast``, ``Exact``, ``One machine``, or the strategy name of any other candidate plan."""
    if candidate.choice.blocks:
        return DIVIDED
    return SINGLE if candidate.choice.alone else _labels(candidates).get(candidate.index, candidate.choice.name)


def label_of_run(plan: RunPlan) -> str:
    """Return the label of a run's way to train; the strategy's name where nothing is known of what it exchanges."""
    if plan.is_staged:
        return DIVIDED
    if plan.world_size == 1:
        return SINGLE
    from training.strategies.registry import cost_model  # all strategies, which the set-up's first screen does without

    strategy = plan.profile.strategy
    with suppress(BadInput):  # code of the user's states impossible costs
        costs = cost_model(strategy.strategy, strategy)
        if costs is not None:
            return EXACT if costs.exact else FAST
    return strategy.strategy


def _labels(candidates: Sequence[CandidateRow]) -> dict[int, str]:
    """Return labels by index in the ranking; candidate plans without a prediction keep the name of their strategy."""
    groups = [way for way in candidates if way.candidate.predicted and not way.choice.alone and not way.problem]
    groups = [way for way in groups if way.recommended or way.choice.engine != "nccl"]
    fastest = max(groups, key=lambda way: way.candidate.useful_speed_up, default=None)
    advised = next((way for way in groups if way.recommended), fastest)
    if fastest is not None and advised is not None and _speed(fastest) < _ALIKE * _speed(advised):
        fastest = advised
    exact = advised if advised is not None and advised.exact else next((way for way in groups if way.exact), None)
    labels = {way.index: way.choice.name for way in candidates if not way.candidate.predicted}
    labels |= {} if exact is None else {exact.index: EXACT}
    if fastest is not None:
        labels[fastest.index] = BOTH if fastest is exact else FAST
    labels |= {way.index: DIVIDED for way in candidates if way.choice.blocks}
    singles = [way for way in candidates if way.choice.alone]
    single = next((way for way in singles if way.recommended), max(singles, key=_speed, default=None))
    return labels | ({} if single is None else {single.index: SINGLE})


def _speed(candidate: CandidateRow) -> float:
    return 0.0 if candidate.problem else candidate.candidate.useful_speed_up


def advised(candidates: Sequence[CandidateRow], preference: str) -> CandidateRow | None:
    """Return the candidate plan to recommend for the figures shown, after the user has changed a sync interval.

    ``None``: the user gave the recommended one a worse interval.
    """
    recommended = next((way for way in candidates if way.recommended), None)
    moved = next((way for way in candidates if way.interval != way.best_interval), None)
    if recommended is None or moved is None:
        return recommended
    needed = _ALIKE * _speed(recommended) if moved.index != recommended.index else moved.best_speed
    if preference == "fastest" and moved.acceptable and _speed(moved) >= needed:
        return moved
    return None if moved.index == recommended.index else recommended


def rhythm_text(candidate: CandidateRow) -> str:
    """Return how often the machines synchronise; empty for a single machine."""
    from distributed.planning.run_time import divided_members  # pydantic

    if candidate.choice.alone or divided_members(candidate.choice.blocks) == 1:
        return ""
    return f"merging every {counted(candidate.interval, 'step')}" if candidate.interval > 1 else "merging in every step"


def about(candidate: CandidateRow) -> Iterator[str]:
    """Yield sentences about a candidate plan's run time and its effect on the result."""
    if candidate.time is not None:
        yield from candidate.time.sentences
    elif not candidate.candidate.predicted:
        yield "How long it takes is not predicted: nothing is known of what it costs."
    else:
        yield "How long it takes was not measured."
    if candidate.quality:
        yield candidate.quality
