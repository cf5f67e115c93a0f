"""Process entry of a worker of :class:`training.local_trainer.LocalTrainer`, with objects of the caller.

The objects are pickled, as for any child of ``multiprocessing``, which knows how to find the classes of the caller's
script.
"""

from __future__ import annotations

import multiprocessing.spawn
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from training.local_trainer import CALLER, OBJECTS
from training.records.plan import RunPlan
from training.workers.worker import leave, main

if TYPE_CHECKING:
    from training.tasks.base import Task


def _task(plan: RunPlan, secrets: Path) -> Task:
    seed = plan.profile.training.seed
    with (secrets / CALLER).open("rb") as file:  # our own parent wrote both; never from the network
        multiprocessing.spawn.prepare(pickle.load(file))
    import torch

    from training.tasks.base import GroupPosition
    from training.tasks.custom import CustomTask
    from training.tasks.object_files import depends_on_rank, instantiate

    job = torch.load(secrets / OBJECTS, weights_only=False)  # the person's own objects, written by their process
    if depends_on_rank(job):
        return CustomTask(
            plan.profile, lambda rank, world_size: instantiate(job, seed, GroupPosition(rank, world_size))
        )
    return CustomTask(plan.profile, lambda: instantiate(job, seed))


if __name__ == "__main__":
    leave(main(_task, "training.workers.api_worker"))
