"""Predicted time of a step of a pipeline: small pure functions.

Symbols: ``S`` stages and ``M`` micro-batches in a step; ``t_n`` seconds in which stage ``n`` computes forward and
backward of a micro-batch; ``x_n`` seconds in which a micro-batch crosses the boundary behind stage ``n``, and its
gradient crosses it back; ``W_n`` micro-batches that stage ``n`` has under way
(:func:`training.layouts.orders.micro_batches_under_way`).

Sources: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503, section 2.2 (1F1B);
Huang et al. 2019, "GPipe", arXiv 1811.06965, section 2.3 (the bubble, ``(S - 1) / (M + S - 1)`` of a step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineStep:
    """The predicted time of a step, in seconds."""

    seconds: float
    compute: float
    """A step over links of no cost."""
    busy: float
    """Mean time in which a stage computes; the rest is the bubble, and waiting for the links."""

    @property
    def bubble(self) -> float:
        """Share of a step over links of no cost in which a stage does not compute, since the pipeline fills and drains
        and its stages take unequally long."""
        return 1.0 - self.busy / self.compute if self.compute else 0.0

    @property
    def exposed(self) -> float:
        """Seconds by which the links make a step longer: what compute does not hide of the transfers."""
        return self.seconds - self.compute


def pipeline_step(
    compute: Sequence[float],
    transfers: Sequence[float],
    under_way: Sequence[int],
    micro_batches: int,
    network: float = 0.0,
) -> PipelineStep:
    """Predict a step: ``(M - 1) P + sum(t) + sum(x)``, where a micro-batch leaves the pipeline in every period ``P``.

    Exact if all stages take equally long; else an upper bound of the alternating order of 1F1B, whose bubble at the
    ends is smaller with a slow stage in the middle.

    Args:
        compute: ``t_n`` of each stage.
        transfers: ``x_n`` of each boundary.
        under_way: ``W_n`` of each stage.
        network: seconds for which the busiest link, interface or radio channel is busy with one micro-batch.
    """
    fill = sum(compute) + sum(transfers)
    period = max(network, _longest_period(compute, transfers, under_way, micro_batches))
    free_period = _longest_period(compute, [0.0] * len(transfers), under_way, micro_batches)
    return PipelineStep(
        (micro_batches - 1) * period + fill,
        (micro_batches - 1) * free_period + sum(compute),
        micro_batches * sum(compute) / len(compute),
    )


def _longest_period(
    compute: Sequence[float], transfers: Sequence[float], under_way: Sequence[int], micro_batches: int
) -> float:
    """Return the longest time between two micro-batches that the stages allow.

    A stage takes ``t_n`` for each. And it begins the forward ``W_n`` after one only when that one's backward is done;
    stage ``m`` behind it answers a forward with the backward ``W_m - 1`` before it. So a round trip from ``n`` to ``m``
    has room for ``W_n - W_m + 1`` micro-batches. With all of them under way a stage waits for none.
    """
    longest = max(compute)
    for stage in range(len(compute)):
        if under_way[stage] == micro_batches:
            continue
        round_trip = compute[stage]
        for behind in range(stage + 1, len(compute)):
            round_trip += transfers[behind - 1] + compute[behind]
            longest = max(longest, round_trip / (under_way[stage] - under_way[behind] + 1))
    return longest


def shard_bytes(parameters: float, devices: int, number_bytes: float = 2.0, micro_batches: int = 1) -> float:
    """Return the bytes that a device sends in a step if each holds a shard of every weight:
    ``3 M b P (n - 1) / n``, for two gathers of the weights in each pass and one scatter of the gradients, of which no
    device can keep all (Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277, section 3.2)."""
    return 3 * micro_batches * number_bytes * parameters * (devices - 1) / devices


def tensor_bytes(
    numbers: float,
    layers: int,
    devices: int,
    number_bytes: float = 2.0,
    *,
    logits: float = 0.0,
    checkpointing: bool = False,
) -> float:
    """Return the bytes that a device sends in a step if each holds a slice of every matrix: ``4 L`` all-reduces of the
    hidden state, each of ``2 (n - 1) / n`` of it, and for each of them all wait (Shoeybi et al. 2019, "Megatron-LM",
    arXiv 1909.08053, section 3); with logits that are gathered, also one for the embedding and one for the head.

    Args:
        numbers: those of the hidden state of all samples of the step, ``B T D``.
        logits: those of all samples of the step, ``B T V``.
        checkpointing: a block is computed again until all that its backward needs is there: but for its last sum.
    """
    all_reduces = (5 if checkpointing else 4) * layers + (2 if logits else 0)
    return (devices - 1) / devices * number_bytes * (all_reduces * 2 * numbers + logits)
