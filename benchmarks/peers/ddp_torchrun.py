"""The demo job under ``torchrun``: DistributedDataParallel over gloo with gradients in fp16.

Its bf16 hook refuses gloo, so the 16 bits are fp16 here.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from job import Job, parse
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


class Wrapped(DistributedDataParallel):
    """The task asks the model for its parts."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def main() -> None:
    arguments = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = Job(rank, world, arguments.options)
    dist.init_process_group("gloo")
    model = Wrapped(job.model, find_unused_parameters=False)
    model.register_comm_hook(None, fp16_compress_hook)
    for _ in job.train(model):
        pass
    dist.barrier()
    if rank == 0:
        job.evaluate()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
