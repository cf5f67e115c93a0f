"""What members decide about their shares, and the sentences that say why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from profiles.quantities import span_text, time_text

NOTED = 1.3
"""Ratio of two speeds of a member from which its speed has changed."""
_MOST_NAMED = 4
NameOf = Callable[[int], str]


class Decision(NamedTuple):
    """Shares that change from the next step on."""

    sizes: dict[int, int]
    """New micro-batch of every live member, by rank."""
    rank: int
    """The member that the reason names."""
    reason: str


def change_for_speed(
    accumulation: int,
    sizes: Mapping[int, int],
    best: Mapping[int, int],
    speeds: tuple[Mapping[int, float], Mapping[int, float]],
    changes: Sequence[int],
    name_of: NameOf,
) -> Decision:
    """Return the decision with its reason: whose speed changed most, or else who is slowest.

    Args:
        speeds: seconds for a sample by rank, and those at the last change.
        changes: steps after which shares changed before.
    """
    seconds, reference = speeds
    ratios = {rank: seconds[rank] / reference[rank] for rank in sizes}
    changed = max(ratios, key=lambda rank: (abs(math.log(ratios[rank])), -rank))
    since = f"at step {changes[-1]}" if changes else "at the start"
    if not 1 / NOTED < ratios[changed] < NOTED:
        ratio, word = (ratios[changed], "slower") if ratios[changed] > 1 else (1 / ratios[changed], "faster")
        reason = f"{name_of(changed)} computes {ratio:.1f} times {word} than {since}"
    else:
        changed, fastest = (pick(seconds, key=lambda rank: seconds[rank]) for pick in (max, min))
        ratio = seconds[changed] / seconds[fastest]
        reason = f"{name_of(changed)} takes {ratio:.1f} times as long for a sample as {name_of(fastest)}"
    return _decision(accumulation, sizes, best, changed, reason, name_of)


def change_back(
    accumulation: int,
    sizes: Mapping[int, int],
    before: Mapping[int, int],
    step_seconds: tuple[float, float],
    last_change: int,
    name_of: NameOf,
) -> Decision:
    """Return the decision that takes the last change back.

    Args:
        step_seconds: that the last member computed in a step before the change, and with it.
    """
    moved = max(sizes, key=lambda rank: (abs(sizes[rank] - before[rank]), -rank))
    earlier, now = map(time_text, step_seconds)
    since = f"since {name_of(moved)}'s share changed at step {last_change}"
    reason = f"to compute a step takes {now} instead of {earlier} {since}"
    return _decision(accumulation, sizes, before, moved, reason, name_of)


def aside_text(rank: int, seconds: Sequence[float], pause: float, name_of: NameOf) -> str:
    """Return why a member is set aside.

    Args:
        seconds: of a step for its smallest share, and for the others without it.
        pause: seconds until it is tried again.
    """
    alone, without = map(time_text, seconds)
    reason = f"{name_of(rank)} takes {alone} for the smallest share of a step, the others {without} for all of it"
    return f"{reason}: it is set aside for {span_text(pause)}"


def trial_text(rank: int, name_of: NameOf) -> str:
    return f"{name_of(rank)} was set aside, and gets the smallest share of a step again"


def _decision(
    accumulation: int,
    sizes: Mapping[int, int],
    best: Mapping[int, int],
    changed: int,
    reason: str,
    name_of: NameOf,
) -> Decision:
    """Return the decision with the shares before and after it, that of ``changed`` first."""
    counts = {rank: (accumulation * sizes[rank], accumulation * best[rank]) for rank in sizes}
    total = accumulation * sum(sizes.values())
    before, after = counts.pop(changed)
    share = f"its share goes from {before} to {after} of {total} samples" if before != after else (
        f"its share of {total} samples stays {after}")  # fmt: skip
    others = sorted((rank for rank, (old, new) in counts.items() if old != new),
                    key=lambda rank: (-abs(counts[rank][1] - counts[rank][0]), rank))  # fmt: skip
    moved = [f"{name_of(rank)}'s from {counts[rank][0]} to {counts[rank][1]}" for rank in others[:_MOST_NAMED]]
    more = [f"those of {len(others) - _MOST_NAMED} more too"] if len(others) > _MOST_NAMED else []
    return Decision(dict(best), changed, f"{reason}: {', '.join((share, *moved, *more))}")
