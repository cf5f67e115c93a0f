"""The plan of a run on this machine."""

from __future__ import annotations

import math
import os

from profiles.errors import BadInput
from profiles.schema import Profile
from training.data import shares_to_batch_sizes
from training.plan import MemberPlan, RunPlan
from training.run_folder import new_run_id
from training.strategies.registry import check_strategy


def plan_local_run(profile: Profile, workers: int, resume: bool = False) -> RunPlan:
    """Return the plan of a run with ``workers`` workers on this machine.

    Raises:
        BadInput: zero workers, shares that do not fit, an unknown strategy.
    """
    if workers < 1:
        raise BadInput(f"{workers} workers cannot train", "give --local 1 or more")
    shares = _shares(profile.run.shares, workers)
    batch_sizes = shares_to_batch_sizes(shares, profile.training.batch_size)
    threads = profile.training.threads or max(1, (os.cpu_count() or 1) // workers)
    strategy = profile.strategy
    name = "allreduce" if strategy.strategy == "auto" else check_strategy(strategy.strategy)
    chosen = profile.model_copy(update={"strategy": strategy.model_copy(update={"strategy": name})})
    return RunPlan(
        run_id=new_run_id(),
        profile=chosen,
        members=tuple(
            MemberPlan(
                rank=rank,
                name=f"worker-{rank}",
                device=profile.training.device,
                batch_size=size,
                threads=threads,
            )
            for rank, size in enumerate(batch_sizes)
        ),
        engine="torch" if strategy.engine == "torch" else "hub",
        resume=resume,
    )


def _shares(text: str, workers: int) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")] if text.strip() else [1.0] * workers
    except ValueError as error:
        raise BadInput(f'shares = "{text}" is not a list of numbers', "write for example shares = 2,1") from error
    if len(shares) != workers or any(not math.isfinite(s) or s <= 0 for s in shares):
        raise BadInput(
            f'shares = "{text}" does not fit {workers} workers', "give one positive number a worker, or leave it empty"
        )
    return shares
