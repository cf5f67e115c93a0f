"""The ``torch.distributed`` world of the devices of one member, in one machine or, over fast links, in several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from training.exchange.base import STANDSTILL
from training.exchange.torch_backend.work import BACKEND
from training.layouts.carrier import Carrier, GroupCarrier, gather_among


class World(NamedTuple):
    """How the devices reach one another."""

    carrier: Carrier
    mesh: DeviceMesh
    """What torch shards over: the mesh, or NCCL where each device is a GPU of its own."""


def join_world(
    store: Store,
    rank: int,
    names: Sequence[str],
    device: torch.device,
    run_id: str,
    certificates: Path,
    listen: str = "",
) -> World:
    """Make the devices of a member the world of this process: torch shards over that.

    Args:
        names: of the devices' processes, by rank.
        certificates: folder with those of this process.
        listen: literal address at which the other machines dial this process; empty: all devices are in one machine.

    Raises:
        ExchangeError: a device is missing.
    """
    os.environ |= {"MUSTER_CERTIFICATES": str(certificates), "MUSTER_RUN_ID": run_id}
    os.environ["MUSTER_LISTEN"] = listen or "127.0.0.1"
    import training.exchange.torch_backend.process_group  # noqa: F401 - registers the backend

    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=STANDSTILL)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=len(names), timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    carrier = GroupCarrier(world, range(len(names)), names)
    uses_nccl = not listen and has_own_gpus(carrier, device)  # between machines anybody could read its traffic
    group = dist.new_group(backend="nccl", timeout=timeout) if uses_nccl else world
    return World(carrier, DeviceMesh.from_group(group, device.type))


def has_own_gpus(carrier: Carrier, device: torch.device) -> bool:
    """Whether each device is a GPU of its own, as NCCL needs them."""
    gpu = ""
    if device.type == "cuda" and dist.is_nccl_available():
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus = gather_among(carrier, gpu.encode())
    return b"" not in gpus and len(set(gpus)) == len(gpus)
