"""The evaluation of each member's own weights, just before they are averaged.

Between two synchronisations of a strategy such as DiLoCo the members' weights differ. Beside the evaluation of the
averaged weights, to which every member contributes its share of the split, each then tells what its own reach on all of
it: whether averaging helps shows there. Where gradients are averaged in every step, both are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from training.evaluation import Evaluator
from training.events import EvaluationEvent
from training.position import Position
from training.strategies.base import Strategy


def evaluate_own(
    evaluator: Evaluator,
    strategy: Strategy,
    position: Position,
    total_steps: int,
    emit: Callable[[EvaluationEvent], None],
) -> float:
    """Evaluate what this member holds, before the strategy ends a step, where the average of it is evaluated next.

    After the last step all splits are, as with the averaged weights.

    Returns:
        How many seconds it took; they belong to no step.
    """
    start, step, wait = time.monotonic(), position.step + 1, strategy.steps_to_average
    last = step >= total_steps
    if last or (wait is not None and 0 < position.next_evaluation <= step + wait):
        for event in evaluator.evaluate_alone(step, every=last):
            emit(event)
    return time.monotonic() - start
