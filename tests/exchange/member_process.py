"""A member as a process: it averages its rank again and again, and prints what came of it, until its input closes."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

from training.exchange.base import ExchangeError
from training.exchange.codecs import codec_by_name
from training.exchange.mesh_member import MeshMember


def main(address: str, rank: int, size: int, certificates: str = "") -> None:
    own = Path(certificates) / f"member-{rank}" if certificates else None
    member = MeshMember.connect(address, own, "r", rank, size, f"m{rank}", timeout=60)
    member.expect_model(4)
    end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
    codec = codec_by_name("fp32")
    while not end.is_set():
        try:
            result = member.mean("x", torch.full((4,), float(rank)), 1.0, codec)
        except ExchangeError as error:
            print(json.dumps({"error": type(error).__name__, "why": str(error)}), flush=True)
            break
        said = {"n": member.operations, "mean": result.mean.tolist(), "members": result.members}
        print(json.dumps({**said, "included": result.included, "at": time.time()}), flush=True)
        time.sleep(0.005)
    member.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
