"""Whose gradient is out of all proportion: a machine that computes finite garbage spoils the mean of all.

Norms vary from batch to batch, the more the smaller batches are, and fall while a model warms up; on all machines
alike, and by tens at most. A gradient counts as odd if it is :data:`_RATIO` times as long as that of each other machine
in the same step, and as all that any machine had in the steps before; or, where a machine was never otherwise, if that
was so in :data:`_LEAST` steps one after another. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator

from training.events import StepEvent, WarningEvent

_RATIO = 100.0
_LEAST, _WINDOW = 8, 64
"""Steps of a machine that have to be known, and that are."""
_MOST_STEPS = 32
"""Steps of which the norms are kept until all have come."""


class GradientNorms:
    """The norms of the members' own gradients, step by step."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, dict[int, float]] = OrderedDict()
        self._members: set[int] = set()
        """Of whom a norm of each step is expected."""
        self._judged: dict[int, set[int]] = {}
        self._usual: dict[int, deque[float]] = {}
        self._streaks: Counter[int] = Counter()
        self._odd: Counter[int] = Counter()

    def note(self, rank: int, step: int, norm: float) -> list[tuple[int, int, float]]:
        """Take a norm in; a step is judged when all members have told theirs, or when it is too old to wait longer.

        Returns:
            Members to warn of, each with the step and how many times as long its gradient of that is: of each the first
            time, the tenth, the hundredth ...
        """
        self._steps.setdefault(step, {})[rank] = norm
        self._members.add(rank)
        warnings: list[tuple[int, int, float]] = []
        if len(self._steps) > _MOST_STEPS:
            oldest = next(iter(self._steps))
            warnings += self._judge(oldest)
            self._members = set(self._steps.pop(oldest)) | {rank}
            self._judged.pop(oldest, None)
        for one in [one for one, norms in self._steps.items() if self._members <= norms.keys()]:
            warnings += self._judge(one)
        return warnings

    def _judge(self, step: int) -> list[tuple[int, int, float]]:
        """Judge those that have told their norm of a step and were not judged."""
        norms = self._steps[step]
        if len(norms) < 2:
            return []
        fresh = norms.keys() - self._judged.get(step, set())
        self._judged[step] = set(norms)
        ratios = {one: self._ratio(one, norms) for one in sorted(fresh)}
        return [(one, step, ratio) for one, ratio in ratios.items() if ratio and self._is_news(one)]

    def warnings(self, rank: int, event: StepEvent, name: Callable[[int], str]) -> Iterator[WarningEvent]:
        """Take a member's step in, and yield a warning of each member whose gradient is out of all proportion."""
        norm = event.own_norm if event.own_norm is not None else event.grad_norm
        for odd, step, ratio in self.note(rank, event.step, norm) if norm is not None else ():
            what = f"{name(odd)}: its gradient of step {step} is {ratio:.1g} times as long as each other one"
            message = f"{what}, and spoils the mean; look at its samples, memory and device, or drop {name(odd)}"
            yield WarningEvent(member=odd, step=step, message=message)

    def _ratio(self, rank: int, norms: dict[int, float]) -> float:
        """Return how many times as long as the others' a member's gradient is; 0: it is not odd."""
        norm, others = norms[rank], max(other for one, other in norms.items() if one != rank)
        usual = self._usual.setdefault(rank, deque(maxlen=_WINDOW))
        if not others or norm <= _RATIO * others:
            self._streaks[rank] = 0
            usual.append(norm)
            return 0.0
        self._streaks[rank] += 1
        longest = max((max(one) for one in self._usual.values() if one), default=0.0)
        sudden = len(usual) >= _LEAST and norm > _RATIO * longest
        return norm / others if sudden or self._streaks[rank] >= _LEAST else 0.0

    def _is_news(self, rank: int) -> bool:
        self._odd[rank] += 1
        return math.log10(self._odd[rank]).is_integer()
