"""The order of candidate plans, and by what the chosen one is better than another: the same criteria for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distributed.planning.documents.document import Candidate, Choice, Preference, Reason
from distributed.planning.prediction import known_costs, significant
from profiles.errors import counted
from profiles.quantities import machine_text

SIGNIFICANT_RATIO = 1.05
"""Speed ratio below which two candidates are about equal, because predictions are not more exact. A group must be
better than the best machine alone by this factor."""


class Criterion(NamedTuple):
    """A property by which candidates are compared."""

    name: str
    """What the better one has; the code of a reason ends with it."""
    cost: Callable[[Candidate], float]
    """Lower is better."""


def _is_merged(candidate: Candidate) -> bool:
    return not candidate.choice.alone and not known_costs(candidate.choice).exact


def _gain_tier(candidate: Candidate) -> int:
    """Return 0 for a group that is worth it, 1 for one machine, 2 for a group that is not."""
    if candidate.choice.alone:
        return 1
    return 0 if candidate.useful_speed_up >= SIGNIFICANT_RATIO else 2


_FITS = Criterion("fits", lambda c: not c.fits)
_GAINS = Criterion("gains", _gain_tier)
_UNROUNDED = Criterion("fp32", lambda c: c.choice.codec != "fp32")
_FASTER = Criterion("faster", lambda c: -significant(c.useful_speed_up))
_LOWER_LOSS = Criterion("lower-loss", lambda c: c.loss_increase)
_LESS_TRAFFIC = Criterion("less-traffic", lambda c: c.bytes_per_hour)

SIMPLICITY = (
    Criterion("alone", lambda c: not c.choice.alone),
    Criterion("exact", _is_merged),
    Criterion("encrypted", lambda c: c.choice.engine == "nccl"),
    _UNROUNDED,
    Criterion("fewer", lambda c: len(c.choice.members)),
)
"""Of candidates that are about equally fast: one machine before a group; exact gradients before merged weights, whose
loss is known from small models only; the mesh before nccl, which is not encrypted; fp32 before codecs that lose
something; fewer machines before more."""
ORDERS: Mapping[Preference, tuple[Criterion, ...]] = {
    "fastest": (_FITS, _FASTER, _LOWER_LOSS, _UNROUNDED, _LESS_TRAFFIC),
    "closest-to-exact": (_FITS, _GAINS, _LOWER_LOSS, _UNROUNDED, _FASTER, _LESS_TRAFFIC),
    "least-traffic": (
        _FITS,
        _GAINS,
        Criterion("less-traffic", lambda c: significant(c.bytes_per_hour)),
        _FASTER,
        _LOWER_LOSS,
        _UNROUNDED,
        _LESS_TRAFFIC,
    ),
}
"""The criteria of a ranking, the most important first."""


def about_equal(left: Candidate, right: Candidate) -> bool:
    """Whether two candidates differ by less than the error of predictions."""
    slower, faster = sorted((significant(left.useful_speed_up), significant(right.useful_speed_up)))
    return slower * SIGNIFICANT_RATIO >= faster


def simplicity(candidate: Candidate) -> tuple[float, ...]:
    """Return a sort key of candidates that are about equally fast, the simplest first: :data:`SIMPLICITY`."""
    return tuple(criterion.cost(candidate) for criterion in SIMPLICITY)


def order(candidate: Candidate, preference: Preference) -> tuple[object, ...]:
    """Return the sort key of a ranking: best first, no two equal."""
    choice = candidate.choice
    configuration = (choice.members, choice.engine, choice.strategy, choice.codec)
    return (*(criterion.cost(candidate) for criterion in ORDERS[preference]), *configuration)


def simplest_first(ranking: Sequence[Candidate]) -> list[Candidate]:
    """Return a ranking by speed with the simplest of those that are about as fast as the first one at its front."""
    near_ties = [candidate for candidate in ranking if candidate.fits and about_equal(candidate, ranking[0])]
    simplest = min(near_ties, key=simplicity)  # the fastest of equally simple ones, since they are sorted
    return [simplest, *(candidate for candidate in ranking if candidate is not simplest)]


def advantage(chosen: Candidate, rival: Candidate, preference: Preference) -> Criterion | None:
    """Return the criterion by which a candidate was chosen and not another that is about as fast; ``None``: they are
    equal in all."""
    simplest = SIMPLICITY if preference == "fastest" else ()
    criteria = (*simplest, *ORDERS[preference])
    return next((each for each in criteria if each.cost(chosen) != each.cost(rival)), None)


def near_tie(best: Candidate, ranking: Sequence[Candidate], preference: Preference) -> Iterator[Reason]:
    """Yield by what the chosen group is better than the fastest other candidate, if that is about as fast."""
    chosen = best.choice.without_interval
    others = (c for c in ranking if c.fits and c.choice.without_interval != chosen and about_equal(c, best))
    rival = max(others, key=lambda candidate: candidate.useful_speed_up, default=None)
    if rival is None:
        return
    criterion = advantage(best, rival, preference)
    subject, other = _names_of(best.choice, rival.choice)
    yield Reason.of(f"rather-{criterion.name if criterion else 'equal'}", subject, other, useful=best.useful_speed_up,
                    rival=rival.useful_speed_up, percent=100 * (SIGNIFICANT_RATIO - 1))  # fmt: skip


def _names_of(*choices: Choice) -> list[str]:
    """Return what tells choices apart: strategy, codec and engine; where their machines differ, these too."""
    are_differing = len({choice.members for choice in choices}) > 1

    def name(choice: Choice) -> str:
        if choice.alone:
            return f"{machine_text(choice.members[0])} alone"
        members = f" with {counted(len(choice.members), 'machine')}" if are_differing else ""
        return f"{choice.name} over {choice.over}{members}"

    return [name(choice) for choice in choices]
