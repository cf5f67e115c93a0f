"""The layouts in which a job could be trained, each with its prediction and the reason why it is taken or not.

``replicate``: every member holds the whole model. ``pipeline``: the devices of a member hold consecutive blocks each;
with several members this is a hybrid, in which the devices of a column exchange their part. ``shard``: each device
holds a part of every weight, and gathers the others before it computes. ``tensor``: each device computes a part of
every matrix.

The rule: a model that fits one machine is never divided, also if it does so only with smaller micro-batches,
checkpointing, adapters or a base in 8 or 4 bits, as far as the user left these options open
(:mod:`distributed.planning.memory.fitting`): that is faster than every layout. A pipeline is taken where it fits;
``shard`` and ``tensor`` only inside a machine, where sending is less than 0.3 of computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count, groupby, pairwise, permutations, takewhile
from math import comb, inf
from typing import Literal, cast

from distributed.planning.documents.cluster import Cluster, ClusterMachine
from distributed.planning.documents.document import Reason
from distributed.planning.layouts.cut import PlannedCut, StageChain, StageDevice
from distributed.planning.layouts.divided import sharded, tensor
from distributed.planning.layouts.layout_documents import Layout, LayoutCandidate, LayoutJob, StageForecast, refusal
from distributed.planning.layouts.stage_devices import FP32_BYTES, StagedJob, budget_of
from distributed.planning.memory.fitting import NO_TOLERANCE, MemoryBudget, changed_options, fit_to_budgets
from distributed.planning.memory.memory_model import need_of
from profiles.errors import BadInput, counted
from profiles.schema import Profile
from training.tasks.inputs.model_size import ModelSize

MOST_ORDERED = 5
"""Devices of which all orders are tried; more stand in the order of their memory, because the first stage has the most
micro-batches under way."""
_MOST_CHOICES = 60
"""Choices among more devices that are tried; of more choices two: the devices with the most memory, and the fastest."""
_MOST_EXTRA = 16
"""Values of ``extra`` that are tried one by one; larger ones are doubled."""


def layout_candidates(job: LayoutJob) -> list[LayoutCandidate]:
    """Return all layouts, the accepted ones first: those that train as the profile says, then the fastest.

    Raises:
        BadInput: no device trains, or none was measured.
    """
    if not job.devices:
        raise BadInput("no machine of these was measured", "measure them first")
    whole = [] if job.divides else whole_candidates(job)
    if whole:
        fitting = min(whole, key=lambda candidate: len(candidate.options))
        others: tuple[Layout, ...] = ("pipeline", "shard", "tensor")
        return [fitting, *(refusal(layout, "layout-not-needed", fitting.reason.subject) for layout in others)]
    candidates = [*_pipelines(job), sharded(job), tensor(job)]
    return [*sorted(candidates, key=_order), *([] if job.divides else [_too_large(job)])]


def _order(candidate: LayoutCandidate) -> tuple[object, ...]:
    """Return the sort key of candidates, best first."""
    learning = ("tuning" in candidate.options, "base_precision" in candidate.options)
    return (not candidate.accepted, learning, -candidate.samples_per_second)


# ---------------------------------------------------------------------------------------------------------- one machine


def whole_candidates(job: LayoutJob) -> list[LayoutCandidate]:
    """Return the layout without a division on each device that can hold the model with the options that are open."""
    return [each for machine in job.devices if (each := _whole(job, machine)) is not None]


def _whole(job: LayoutJob, machine: ClusterMachine) -> LayoutCandidate | None:
    budget, run = budget_of(machine), job.profile.run.model_copy(update={"layout": "replicate"})
    whole = job.profile.model_copy(update={"run": run})
    try:
        fitted = fit_to_budgets(whole, job.size, [budget], True, job.with_bitsandbytes, NO_TOLERANCE)
    except BadInput:
        return None
    staged = replace(job.stagings()[0], profile=fitted.profile)
    seconds = sum(staged.seconds(machine))
    need = need_of(fitted.profile, job.size, True, on_gpu=machine.device == "cuda", bf16=machine.bf16)
    forecast = StageForecast(
        name=machine.name,
        start=0,
        end=len(job.size.blocks),
        seconds=seconds,
        under_way=1,
        memory=need.total,
        memory_usable=budget.usable,
    )
    return LayoutCandidate(
        layout="replicate",
        accepted=True,
        reason=Reason.of("layout-fits", machine.name),
        members=((forecast,),),
        options=fitted.changes,
        micro_batch=staged.batch,
        micro_batches=staged.micro_batches,
        step=staged.micro_batches * seconds,
    )


def _too_large(job: LayoutJob) -> LayoutCandidate:
    """Return the refusal of a layout without a division, with the device that comes closest."""

    def missing(machine: ClusterMachine) -> tuple[int, int, str]:
        on_gpu, bf16 = machine.device == "cuda", machine.bf16
        need = min(need_of(s.profile, job.size, alone=True, on_gpu=on_gpu, bf16=bf16).total for s in job.stagings())
        return need - budget_of(machine).usable, need, machine.name

    lacking, need, name = min(map(missing, job.devices))
    return refusal("replicate", "layout-too-large", name, needed=need, free=need - lacking)


# ------------------------------------------------------------------------------------------------------------ pipelines


def pipeline_in_memory(profile: Profile, size: ModelSize, budgets: Sequence[MemoryBudget]) -> LayoutCandidate:
    """Return a pipeline of one member for machines of which only the memory is known: one that fits, or the refusal of
    one over all of them. Its times mean nothing.

    Args:
        size: of a model with known blocks.
    """
    each = [budget for budget in budgets for _ in range(budget.members)]
    machines = [
        ClusterMachine(
            name=budget.name if len(each) == len({b.name for b in each}) else f"{budget.name}:{index}",
            identity="one machine",  # so that all are linked
            device=cast(Literal["cpu", "cuda", "mps"], budget.device),
            bf16=budget.bf16,
            memory_total=budget.total // (1 if budget.device == "cuda" else budget.members),
            blocks=(1.0,) * len(size.blocks),
        )
        for index, budget in enumerate(each)
    ]
    pipelines = _pipelines(LayoutJob(profile, size, Cluster(machines=tuple(machines)), divides=True), 1)
    refused: LayoutCandidate | None = None
    for pipeline in pipelines:
        if pipeline.accepted:
            return pipeline
        refused = pipeline
    assert refused is not None  # with fewer than two devices it is one refusal
    return refused


def _pipelines(job: LayoutJob, most_members: int = 0) -> Iterator[LayoutCandidate]:
    """Yield the best pipeline for each number of members and of devices in each.

    Args:
        most_members: 0: as many as there are devices for.
    """
    devices = len(job.devices)
    if not job.size.blocks:
        yield refusal("pipeline", "layout-no-blocks")
    elif len(job.size.blocks) == 1:
        yield refusal("pipeline", "layout-one-block")
    elif job.size.teacher is not None:
        yield refusal("pipeline", "layout-teacher")
    elif devices < 2:
        yield refusal("pipeline", "layout-one-device", job.devices[0].name)
    else:
        for members in range(1, (most_members or devices // 2) + 1):
            for stages in range(2, min(devices // members, len(job.size.blocks)) + 1):
                yield _pipeline(job, members, stages)


def _pipeline(job: LayoutJob, members: int, stages: int) -> LayoutCandidate:
    """Return the fastest pipeline with the first way to train that fits: as the profile says, with adapters, or with
    their base in 8 or 4 bits."""
    stagings = job.stagings(stages)
    for _, group in groupby(stagings, key=lambda s: (s.profile.model.tuning, s.profile.model.base_precision)):
        best: LayoutCandidate | None = None
        for _, alike in groupby(group, key=lambda staged: (staged.profile.model, staged.profile.training)):
            by_evaluation = list(alike)  # which takes no part in a step's time: the largest first
            planned = _fastest(job, by_evaluation[-1], members, stages, best.step if best else inf)
            if planned is not None:
                forecasts = (_forecast(job, staged, *planned) for staged in by_evaluation)
                best = next((f for f in forecasts if f.fits), None) or _forecast(job, by_evaluation[-1], *planned)
        if best is not None:
            return best
    devices = f"{counted(members, 'member')} of {counted(stages, 'device')}"
    if not any(chain.is_linked for chain in _chains(job, stagings[0], members, stages)):
        return refusal("pipeline", "layout-no-link", devices)
    return _too_small(job, stagings[-1], members, stages) or refusal("pipeline", "layout-no-memory", devices)


def _too_small(job: LayoutJob, staged: StagedJob, members: int, stages: int) -> LayoutCandidate | None:
    """Return the refusal of a pipeline for a block that fits no device, or for a device that holds none."""

    def lacking(machine: ClusterMachine, block: int) -> tuple[int, int, str]:
        usable = budget_of(machine).usable
        need = staged.need(machine, block, block + 1, 1, members == 1) if machine.memory_total else usable
        return need - usable, need, machine.name

    blocks = range(len(job.size.blocks))
    nearest = [min(lacking(machine, block) for machine in job.devices) for block in blocks]
    block = max(blocks, key=nearest.__getitem__)
    missing, need, name = nearest[block]
    if missing > 0:
        ends = {job.size.encoder_layers: " with the embedding", blocks[-1]: " with the head"}
        block_name = f"block {block + 1}{ends.get(block, '')}"
        return refusal("pipeline", "layout-large-block", name, block_name, needed=need, free=need - missing)
    small = [m.name for m in job.devices if all(lacking(m, block)[0] > 0 for block in blocks)]
    if len(job.devices) - len(small) < members * stages:
        return refusal("pipeline", "layout-small-devices", small[0], counted(members * stages, "device"))
    return None


def _fastest(
    job: LayoutJob, staged: StagedJob, members: int, stages: int, limit: float
) -> tuple[StageChain, PlannedCut] | None:
    """Return the order of devices and the cut with the shortest step; ``None`` if none takes less than ``limit``
    seconds."""
    best: tuple[StageChain, PlannedCut] | None = None
    for chain in _chains(job, staged, members, stages):
        for extra in _extras(chain.largest_extra) if chain.is_linked else ():
            further = replace(chain, extra=extra)
            if (planned := further.best(limit)) is not None:
                best, limit = (further, planned), planned.seconds
    return best


def _extras(largest: int) -> list[int]:
    """Return the values of ``extra`` that are tried."""
    doubled = takewhile(lambda extra: extra < largest, (_MOST_EXTRA << power for power in count(1)))
    return [*range(min(largest, _MOST_EXTRA) + 1), *doubled, *([largest] if largest > _MOST_EXTRA else [])]


def _orders(devices: Sequence[StageDevice], chosen: int) -> Iterable[tuple[int, ...]]:
    """Return choices of so many devices, as indices in the order of the stages."""
    indices = range(len(devices))
    if len(devices) <= MOST_ORDERED:
        return permutations(indices, chosen)
    if comb(len(devices), chosen) <= _MOST_CHOICES:
        return combinations(indices, chosen)
    fastest = sorted(indices, key=lambda index: sum(devices[index].seconds))[:chosen]
    return {tuple(indices[:chosen]), tuple(sorted(fastest))}


def _chains(job: LayoutJob, staged: StagedJob, members: int, stages: int) -> Iterator[StageChain]:
    """Yield the orders of devices in so many members of so many stages, without those that only swap members."""
    devices = [staged.device(machine, members == 1) for machine in job.devices]
    for order in _orders(devices, members * stages):
        columns = [order[stage * members : (stage + 1) * members] for stage in range(stages)]
        if list(columns[0]) == sorted(columns[0]):
            yield StageChain(
                tuple(tuple(devices[index] for index in column) for column in columns),
                staged.boundaries(),
                job.cluster,
                staged.micro_batches,
                trained=staged.trained(),
                interval=job.interval,
                tied_bytes=FP32_BYTES * staged.tied,
                embedding=job.size.encoder_layers,
            )


def _forecast(job: LayoutJob, staged: StagedJob, chain: StageChain, planned: PlannedCut) -> LayoutCandidate:
    step, ends = planned.step, list(pairwise(planned.bounds))

    def stage(member: int, number: int) -> StageForecast:
        device = chain.columns[number][member]
        machine, (start, end) = job.cluster.machine(device.name), ends[number]
        under_way = chain.under_way[number]
        return StageForecast(
            name=device.name,
            start=start,
            end=end,
            seconds=sum(device.seconds[start:end]),
            under_way=under_way,
            memory=staged.need(machine, start, end, under_way, chain.members == 1),
            memory_usable=budget_of(machine).usable,
        )

    members = tuple(
        tuple(stage(member, number) for number in range(len(chain.columns))) for member in range(chain.members)
    )
    names = ["+".join(forecast.name for forecast in member) for member in members]
    sizes = ":".join(str(end - start) for start, end in ends)
    share = 1 - step.compute / planned.seconds
    numbers = {"step": planned.seconds, "bubble": 100 * step.bubble, "share": 100 * share}
    return LayoutCandidate(
        layout="pipeline",
        accepted=True,
        reason=Reason.of("layout-pipeline", ", ".join(names), sizes, **numbers),
        members=members,
        options=changed_options(job.profile, staged.profile),
        micro_batch=staged.batch,
        micro_batches=staged.micro_batches,
        extra=chain.extra,
        step=planned.seconds,
        bubble=step.bubble,
        exposed=step.exposed,
        tied_sum=planned.tied_sum,
        exchange=planned.exchange,
    )
