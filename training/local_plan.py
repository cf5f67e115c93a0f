"""The plan of a run on this machine."""

from __future__ import annotations

import logging

from profiles.counts import counted
from profiles.errors import BadInput
from profiles.schema import Profile
from training.data import shares_to_batch_sizes
from training.plan import MemberPlan, RunPlan
from training.resources import count_gpus, whole_cores
from training.run_folder import new_run_id
from training.strategies.registry import check_strategy, usual_strategy
from training.tasks.published_models import with_local_model

logger = logging.getLogger("muster.plan")


def plan_local_run(profile: Profile, workers: int, resume: bool = False, *, here: bool = True) -> RunPlan:
    """Return the plan of a run with ``workers`` workers on this machine, or elsewhere if not ``here``.

    Raises:
        BadInput: zero workers, shares that do not fit, an unknown strategy.
    """
    if workers < 1:
        raise BadInput(f"{counted(workers, 'worker')} cannot train", "pass --local 1 or more")
    text = profile.run.shares
    shares = [float(part) for part in text.split(",")] if text else [1.0] * workers
    if len(shares) != workers:
        message = f'shares = "{text}" does not fit {counted(workers, "worker")}'
        raise BadInput(message, "set one positive number per worker, or leave it empty")
    batch_sizes = shares_to_batch_sizes(shares, profile.training.batch_size)
    threads = profile.training.threads or max(1, whole_cores() // workers)
    strategy = profile.strategy
    name = usual_strategy() if strategy.strategy == "auto" else check_strategy(strategy.strategy)
    chosen = with_local_model(profile).model_copy(update={"strategy": strategy.model_copy(update={"strategy": name})})
    devices = _device_indices(profile.training.device, workers) if here else [0] * workers
    return RunPlan(
        run_id=new_run_id(),
        profile=chosen,
        members=tuple(
            MemberPlan(
                rank=rank,
                name=f"worker-{rank}",
                device=profile.training.device,
                device_index=devices[rank],
                batch_size=size,
                threads=threads,
                local=True,
            )
            for rank, size in enumerate(batch_sizes)
        ),
        engine="nccl" if strategy.engine == "nccl" else "mesh",
        resume=resume,
    )


def _device_indices(device: str, workers: int) -> list[int]:
    """Give each worker a GPU of its own; where there are too few, they take turns."""
    gpus = count_gpus() if workers > 1 and device in ("auto", "cuda") else 0
    if 0 < gpus < workers:
        logger.warning("%s share %s", counted(workers, "worker"), counted(gpus, "GPU"))
    return [rank % gpus if gpus else 0 for rank in range(workers)]
