"""Where a model is cut for the devices of a member, and into which micro-batches its steps are divided."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.errors import BadInput, counted
from training.records.plan import DevicePlan

_IN_FLIGHT = 2
"""Micro-batches for each stage into which a step is divided, if it has as many samples."""


def micro_batch_size(batch_size: int, accumulation: int, stages: int) -> int:
    """Return the samples of the micro-batches that pass through a pipeline: at most a member's batch."""
    return min(batch_size, -(-batch_size * accumulation // (_IN_FLIGHT * stages)))


def bounds_of(devices: Sequence[DevicePlan], blocks: int) -> tuple[int, ...]:
    """Return the bounds of the stages: as planned, or into about equal numbers of blocks.

    Returns:
        Stage ``k`` has the blocks from ``bounds[k]`` to ``bounds[k + 1]``, exclusive.

    Raises:
        BadInput: the model has fewer blocks than there are devices, or is not the one that was planned.
    """
    if blocks < len(devices):
        message = f"a model of {counted(blocks, 'block')} cannot lie on {len(devices)} devices"
        raise BadInput(message, f"take at most {blocks}, or set layout = replicate")
    planned = [device.blocks for device in devices if device.blocks is not None]
    if planned:
        bounds = (0, *(end for _, end in planned))
        if len(planned) < len(devices) or [start for start, _ in planned] != [*bounds[:-1]] or bounds[-1] != blocks:
            raise BadInput(f"the plan's stages {planned} are not the {blocks} blocks of the model", "plan it again")
        return bounds
    return tuple(round(blocks * number / len(devices)) for number in range(len(devices) + 1))


def kinds_of_blocks(blocks: int, encoder: int) -> tuple[int, ...]:
    """Return for each block the one that is measured for it: itself at the ends of an encoder and of a decoder, where
    other modules are computed too, else the second one of them.

    Args:
        encoder: how many of the blocks are the encoder's.
    """
    ends = {0, encoder - 1, encoder, blocks - 1}
    return tuple(block if block in ends else 1 if block < encoder else encoder + 1 for block in range(blocks))
