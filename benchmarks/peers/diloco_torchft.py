"""The demo job with torchft's DiLoCo: one replica group a machine, a lighthouse elsewhere, deltas in fp32.

Its quantised all-reduce needs CUDA. Every replica hosts the TCPStore that its manager insists on, and names itself by
its address, because torchft advertises the host's name otherwise.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from job import Job, parse
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list of names
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

_PATIENCE = timedelta(seconds=300)


def main() -> None:
    arguments = parse()
    job = Job(arguments.rank, arguments.world, arguments.options)
    store = TCPStore(arguments.address, 0, is_master=True, wait_for_workers=False)
    outer = torch.optim.SGD(job.model.parameters(), lr=1.0, momentum=0.5, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=lambda state: _load(job, state),
        state_dict=lambda: {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()},
        min_replica_size=arguments.world,
        use_async_quorum=False,
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        rank=0,
        world_size=1,
        store_addr=arguments.address,
        store_port=store.port,
        lighthouse_addr=arguments.lighthouse,
        replica_id=f"host_{arguments.rank}",
        hostname=arguments.address,
        init_sync=False,
    )
    with DiLoCo(manager, [job.model], job.optimizer, outer, sync_every=arguments.interval, pin_memory=False):
        for _ in job.train(job.model):
            pass
    if arguments.rank == 0:
        job.evaluate()
    sys.stdout.flush()
    print(f"{manager.current_step()} commits", file=sys.stderr, flush=True)
    os._exit(0)


def _load(job: Job, state: Any) -> None:
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    main()
