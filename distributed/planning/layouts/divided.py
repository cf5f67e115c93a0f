"""Layouts whose devices exchange while they compute, and need links as fast as those inside a machine: ``shard`` and
``tensor``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, groupby

from distributed.planning.cost_model import transfer_seconds
from distributed.planning.documents.cluster import Cluster, ClusterMachine
from distributed.planning.documents.document import Reason
from distributed.planning.layouts.layout_documents import Layout, LayoutCandidate, LayoutJob, StageForecast, refusal
from distributed.planning.layouts.pipeline_step import shard_bytes, tensor_bytes
from distributed.planning.layouts.stage_devices import budget_of
from distributed.planning.memory.memory_model import need_of_shard, need_of_slices
from profiles.quantities import time_text
from profiles.schema import Profile
from training.tasks.inputs.model_size import ModelSize

DIRECT_MBIT = 5_000.0
"""Least rate of a link between two machines over which shards are gathered: half of what a direct cable of 10 Gbit/s
or Thunderbolt carries."""
INSIDE_MBIT = 48_000.0
"""Rate between two devices of one machine, which is not measured: 6 of the 7.9 GB/s of PCIe 3.0 x8."""
_WIRE_BYTES = 2
"""Bytes of a number on the way: bf16."""
_OUTPUTS = 2
"""Numbers that a model holds of each logit (:attr:`~training.tasks.inputs.model_size.ModelSize.outputs`)."""
_WAIT_SECONDS = 50e-6
"""Time in which GPUs of one machine begin an all-reduce, beside what they send."""
_MOST_SENDING = 0.3
"""Largest share of its compute that a step may take to send."""


def sharded(job: LayoutJob) -> LayoutCandidate:
    """Return the layout in which each device holds a part of every weight, and gathers the others to compute."""
    return _divided(job, "shard")


def tensor(job: LayoutJob) -> LayoutCandidate:
    """Return the layout in which each device computes a slice of every matrix."""
    return _divided(job, "tensor")


def sent_bytes(layout: Layout, profile: Profile, size: ModelSize, devices: int, number_bytes: float) -> float:
    """Return the bytes that each device of a member sends to the others in a step with ``shard`` or ``tensor``.

    Args:
        number_bytes: of a number on the way.
    """
    training = profile.training
    if layout == "shard":
        return shard_bytes(size.parameters, devices, number_bytes, training.gradient_accumulation)
    samples = training.batch_size * training.gradient_accumulation
    numbers = samples * max((block.boundary for block in size.blocks), default=0)
    logits = samples * size.outputs / _OUTPUTS
    checkpointing = profile.model.gradient_checkpointing
    return tensor_bytes(numbers, size.layers, devices, number_bytes, logits=logits, checkpointing=checkpointing)


def why_shards(profile: Profile, size: ModelSize, devices: int) -> str:
    """Return why shards are faster than slices of matrices for the devices of a machine; empty: they are not.

    Slices need no weights to be moved, but all devices wait for every sum of theirs; so do more samples in a step. What
    a device sends is compared, and what it waits.
    """
    seconds = {
        layout: transfer_seconds(sent_bytes(layout, profile, size, devices, _WIRE_BYTES), INSIDE_MBIT)
        for layout in ("shard", "tensor")
    }
    waits = 4 * size.layers * profile.training.gradient_accumulation
    tensor_seconds = seconds["tensor"] + waits * _WAIT_SECONDS
    if tensor_seconds < seconds["shard"]:
        return ""
    return f"it would exchange for {time_text(tensor_seconds)} in a step, and shards for {time_text(seconds['shard'])}"


def _divided(job: LayoutJob, layout: Layout) -> LayoutCandidate:
    """Return the layout over the devices of the machine with the most of them; a reason, if each machine has one."""
    devices, is_inside = _together(job.devices)
    names, rate = ", ".join(machine.name for machine in devices), INSIDE_MBIT
    if not job.size.blocks:
        return refusal(layout, "layout-no-blocks")
    if len(devices) < 2:
        return refusal(layout, "layout-one-device", names)
    if any(machine.device == "mps" for machine in devices):
        return refusal(layout, "layout-not-on-mps", layout)
    if not is_inside:
        rate = _slowest_mbit(job.cluster, devices)
    staged = job.stagings()[0]
    seconds = [sum(staged.seconds(machine)) for machine in devices]
    compute = staged.micro_batches / sum(1 / each for each in seconds) if all(seconds) else 0.0
    sent = sent_bytes(layout, job.profile, job.size, len(devices), _WIRE_BYTES)
    sending = transfer_seconds(sent, rate) if rate else 0.0
    if sending > _MOST_SENDING * compute and (is_inside or layout == "shard"):
        return refusal(layout, "layout-slow-link", layout, names, exchange=sending, compute=compute)
    if not is_inside:
        is_direct = layout == "shard" and rate >= DIRECT_MBIT
        return refusal(layout, "layout-by-hand" if is_direct else "layout-outside", layout, names)
    stages = tuple(_forecast(job, layout, machine, len(devices), seconds[0]) for machine in devices)
    candidate = LayoutCandidate(
        layout=layout,
        accepted=True,
        reason=Reason.of("layout-divided", layout, names, step=compute + sending),
        members=(stages,),
        micro_batch=staged.batch,
        micro_batches=staged.micro_batches,
        step=compute + sending,
        exposed=sending,
    )
    if not candidate.fits:
        needed, free = max(stage.memory for stage in stages), min(stage.memory_usable for stage in stages)
        return refusal(layout, "layout-large-share", layout, names, needed=needed, free=free)
    return candidate


def _together(devices: Sequence[ClusterMachine]) -> tuple[Sequence[ClusterMachine], bool]:
    """Return the devices of the machine with the most, and whether it has several; else all devices."""
    by_host = groupby(sorted(devices, key=lambda machine: machine.host), key=lambda machine: machine.host)
    largest = max((list(group) for _, group in by_host), key=len)
    return (largest, True) if len(largest) > 1 else (devices, False)


def _slowest_mbit(cluster: Cluster, devices: Sequence[ClusterMachine]) -> float:
    """Return the rate of the slowest link between any two devices; 0 if two have none."""
    links = [cluster.link(left.name, right.name) for left, right in combinations(devices, 2)]
    return min(0.0 if link is None else min(link.mbit, link.mbit_back) for link in links)


def _forecast(job: LayoutJob, layout: Layout, machine: ClusterMachine, count: int, seconds: float) -> StageForecast:
    """Return what a device takes that holds one of ``count`` equal parts of all weights."""
    need = need_of_slices if layout == "tensor" else need_of_shard
    memory = need(job.profile, job.size, count, on_gpu=machine.device == "cuda", bf16=machine.bf16)
    return StageForecast(
        name=machine.name,
        start=0,
        end=len(job.size.blocks),
        seconds=seconds / count,
        under_way=1,
        memory=memory,
        memory_usable=budget_of(machine).usable,
    )
