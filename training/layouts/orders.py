"""Schedules of a pipeline: the order in which a stage computes its micro-batches, as data.

1F1B is the schedule of PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503, section 2.2): after a warm-up, every
forward is followed by the backward of an earlier micro-batch, so few activations are kept. It assumes links without
delay. On slow links each stage runs some micro-batches further ahead of the next one; the limit is GPipe (Huang et al.
2019, arXiv:1811.06965), where all forwards come first. The last stage never waits for a gradient, so it alternates in
every schedule.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Work(NamedTuple):
    """What a stage computes at once."""

    kind: Kind
    micro_batch: int
    """Number within the step, from 0."""


def extra_micro_batches(transfer_seconds: float, stage_seconds: float) -> int:
    """Return how many micro-batches more than in 1F1B hide the slowest link.

    Args:
        transfer_seconds: of one micro-batch over a boundary, one way; activations and gradients share the link of a
            machine between two others.
        stage_seconds: of one micro-batch forward and backward on a stage.
    """
    return math.ceil(2 * transfer_seconds / stage_seconds)


def micro_batches_under_way(stage: int, stages: int, micro_batches: int, extra: int = 0) -> int:
    """Return how many micro-batches' activations a stage keeps at most.

    Args:
        stage: number of the stage, from 0.
        extra: micro-batches that a stage runs further ahead of the next one than in 1F1B, see
            :func:`extra_micro_batches`; ``micro_batches`` or more is GPipe.
    """
    return min(1 + (stages - 1 - stage) * (1 + extra), micro_batches)


def pipeline_order(stage: int, stages: int, micro_batches: int, extra: int = 0) -> list[Work]:
    """Return the works of a stage in one step: every micro-batch forward once, and backward once, each in its order.

    Args:
        extra: see :func:`micro_batches_under_way`; the same on all stages.
    """
    forwards, backwards = forward_order(micro_batches), [Work("backward", index) for index in range(micro_batches)]
    warm_up = max(0, micro_batches_under_way(stage, stages, micro_batches, extra) - 1)
    alternating = [work for pair in zip(forwards[warm_up:], backwards) for work in pair]
    return forwards[:warm_up] + alternating + backwards[micro_batches - warm_up :]


def forward_order(micro_batches: int) -> list[Work]:
    """Return the works of a stage in an evaluation."""
    return [Work("forward", index) for index in range(micro_batches)]
