"""A member as a process: for every line of its input it averages its rank so often, and prints what came of it.

python member_process.py ADDRESS RANK SIZE ENGINE [CERTIFICATES]

Engine ``nccl-cuda`` puts all members on the first GPU. NCCL refuses two ranks of one host there, so each says that it
is another host; then they meet over sockets, as machines of a network do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from training.exchange.base import ExchangeDropped, JoiningState
from training.exchange.codecs import codec_by_name
from training.exchange.group.join_config import JoinConfig
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.stock_torch import torch_group
from training.exchange.stock_torch.torch_mean import TorchMember

ELEMENTS = 8192
DEVICE = torch.device("cpu")


def connect(address: str, rank: int, size: int, engine: str, certificates: str) -> MeshMember:
    own = Path(certificates) / f"member-{rank}" if certificates else None
    joining = JoinConfig(address, own, "r", rank, size, f"m{rank}")
    member = MeshMember(joining) if engine == "mesh" else TorchMember(joining, DEVICE)
    member.join(60)
    member.expect_model(ELEMENTS)
    if member.is_newcomer:
        member.fetch_state(60)
    print(json.dumps({"in": member.operations}), flush=True)
    return member


def exchange(member: MeshMember) -> None:
    if member.must_publish_state:
        member.publish_state(JoiningState({}, {}))
    result = member.mean("x", torch.full((ELEMENTS,), float(member.rank), device=DEVICE), 1.0, codec_by_name("fp32"))
    said = {"n": member.operations, "mean": result.mean[:: ELEMENTS // 4].tolist(), "members": result.members}
    print(json.dumps({**said, "included": result.included, "at": time.time()}), flush=True)


def main(address: str, rank: int, size: int, engine: str, certificates: str = "") -> None:
    global DEVICE
    print(json.dumps({"pid": os.getpid()}), flush=True)
    if engine == "nccl-cuda":
        DEVICE = torch.device("cuda", 0)
        os.environ["NCCL_HOSTID"] = f"machine-{rank}"
        torch_group.choose_backend = lambda mesh, said: "nccl"
    member = connect(address, rank, size, engine, certificates)
    for line in sys.stdin:
        for _ in range(int(line)):
            try:
                exchange(member)
            except ExchangeDropped:
                member.close()
                member = connect(address, rank, size, engine, certificates)
                break
    member.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
