"""A member as a process: for every line of its input it averages its rank so often, and prints what came of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from training.exchange.base import Anchor, ExchangeDropped
from training.exchange.codecs import codec_by_name
from training.exchange.mesh_member import MeshMember


def connect(address: str, rank: int, size: int, certificates: str) -> MeshMember:
    own = Path(certificates) / f"member-{rank}" if certificates else None
    member = MeshMember.connect(address, own, "r", rank, size, f"m{rank}", timeout=60)
    member.expect_model(4)
    if member.is_newcomer:
        member.fetch_anchor(60)
    print(json.dumps({"in": member.operations}), flush=True)
    return member


def exchange(member: MeshMember) -> None:
    if member.anchor_wanted:
        member.publish_anchor(Anchor({}, {}))
    result = member.mean("x", torch.full((4,), float(member.rank)), 1.0, codec_by_name("fp32"))
    said = {"n": member.operations, "mean": result.mean.tolist(), "members": result.members}
    print(json.dumps({**said, "included": result.included, "at": time.time()}), flush=True)


def main(address: str, rank: int, size: int, certificates: str = "") -> None:
    member = connect(address, rank, size, certificates)
    for line in sys.stdin:
        for _ in range(int(line)):
            try:
                exchange(member)
            except ExchangeDropped:
                member.close()
                member = connect(address, rank, size, certificates)
                break
    member.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
