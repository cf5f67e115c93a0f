"""Finds gradients out of all proportion: a machine that computes finite garbage spoils the mean of all.

Norms vary from batch to batch, the more the smaller batches are, and fall while a model warms up; on all machines
alike, and by tens at most. A gradient counts as odd if it is :data:`_RATIO` times as long as that of each other machine
in the same step, and as all that any machine had in the steps before; or, where a machine was never otherwise, if that
was so in :data:`_LEAST` steps one after another. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator

from profiles.quantities import figure_text
from training.records.events import StepEvent, WarningEvent

_RATIO = 100.0
_LEAST, _WINDOW = 8, 64
"""Steps of a machine that are needed for a judgement, and that are remembered."""
_MOST_STEPS = 32
"""Steps of which the norms are kept until all have come."""


class GradientNorms:
    """The norms of the members' own gradients, step by step."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, dict[int, float]] = OrderedDict()
        self._members: set[int] = set()
        """Members that are expected to report a norm for each step."""
        self._judged: dict[int, set[int]] = {}
        self._recent_norms: dict[int, deque[float]] = {}
        self._streaks: Counter[int] = Counter()
        self._odd_counts: Counter[int] = Counter()

    def note(self, rank: int, step: int, norm: float) -> list[tuple[int, int, float]]:
        """Record a norm; a step is judged when all members have reported theirs, or when it is too old to wait longer.

        Returns:
            Members to warn of, each with the step and the ratio of its gradient norm to the others': each member the
            first time, the tenth, the hundredth ...
        """
        self._steps.setdefault(step, {})[rank] = norm
        self._members.add(rank)
        warnings: list[tuple[int, int, float]] = []
        if len(self._steps) > _MOST_STEPS:
            oldest = next(iter(self._steps))
            warnings += self._judge(oldest)
            self._members = set(self._steps.pop(oldest)) | {rank}
            self._judged.pop(oldest, None)
        for complete_step in [number for number, norms in self._steps.items() if self._members <= norms.keys()]:
            warnings += self._judge(complete_step)
        return warnings

    def _judge(self, step: int) -> list[tuple[int, int, float]]:
        """Judge the members that have reported their norm of a step and were not judged yet."""
        norms = self._steps[step]
        if len(norms) < 2:
            return []
        unjudged = norms.keys() - self._judged.get(step, set())
        self._judged[step] = set(norms)
        ratios = {rank: self._ratio(rank, norms) for rank in sorted(unjudged)}
        return [(rank, step, ratio) for rank, ratio in ratios.items() if ratio and self._is_news(rank)]

    def warnings(self, rank: int, event: StepEvent, name: Callable[[int], str]) -> Iterator[WarningEvent]:
        """Record a member's step; yield a warning about each member whose gradient is out of all proportion."""
        norm = event.own_norm if event.own_norm is not None else event.grad_norm
        for odd, step, ratio in self.note(rank, event.step, norm) if norm is not None else ():
            finding = f"{name(odd)}: its gradient of step {step} is {figure_text(ratio)} times as long as the others"
            message = f"{finding}, and spoils the mean; look at its samples, memory and device, or drop {name(odd)}"
            yield WarningEvent(member=odd, step=step, message=message)

    def _ratio(self, rank: int, norms: dict[int, float]) -> float:
        """Return the ratio of a member's gradient norm to the largest of the others; 0: it is not odd."""
        norm, others = norms[rank], max(norm for member, norm in norms.items() if member != rank)
        usual = self._recent_norms.setdefault(rank, deque(maxlen=_WINDOW))
        if not others or norm <= _RATIO * others:
            self._streaks[rank] = 0
            usual.append(norm)
            return 0.0
        self._streaks[rank] += 1
        longest = max((max(recent) for recent in self._recent_norms.values() if recent), default=0.0)
        sudden = len(usual) >= _LEAST and norm > _RATIO * longest
        return norm / others if sudden or self._streaks[rank] >= _LEAST else 0.0

    def _is_news(self, rank: int) -> bool:
        self._odd_counts[rank] += 1
        return math.log10(self._odd_counts[rank]).is_integer()
