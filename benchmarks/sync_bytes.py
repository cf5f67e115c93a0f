"""Bytes of one synchronisation against theory, counted by us and at the network interface.

    .venv/bin/python benchmarks/sync_bytes.py [--members 2 3] [--megabytes 4 40]

As root it moves into a network namespace of its own, so that its loopback interface carries nothing else. Theory:
every member sends ``2 (n-1)/n`` of the payload. ``nccl`` goes over gloo, in clear. Two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CODECS = ("fp32", "bf16", "int8", "mxfp4")
REPEATS = 4


def interface_bytes() -> int:
    """Bytes sent over loopback so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    return 0


def member(engine: str, rank: int, world: int, address: str, secrets: str, elements: int) -> None:
    """Body of one member: for every codec wait for a line, exchange, say what was counted."""
    import torch

    from training.exchange.codecs import codec_by_name
    from training.exchange.group.join_config import JoinConfig
    from training.exchange.mean.mesh_member import MeshMember
    from training.exchange.stock_torch.torch_mean import TorchMember

    torch.set_num_threads(1)
    keys = Path(secrets) / f"member-{rank}"
    joining = JoinConfig(address, keys, "bench", rank, world, f"m{rank}")
    exchange = MeshMember(joining) if engine == "mesh" else TorchMember(joining, torch.device("cpu"))
    exchange.join(60)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
    print("ready", flush=True)
    for codec in CODECS:
        sys.stdin.readline()
        before = exchange.traffic.copy()
        for repeat in range(REPEATS):
            exchange.mean(f"{codec}/{repeat}", values, 1.0, codec_by_name(codec))
        counted = exchange.traffic.since(before)
        print(json.dumps([counted.bytes_sent / REPEATS, counted.bytes_received / REPEATS]), flush=True)
    sys.stdin.readline()
    exchange.close()
    os._exit(0)


def measure(engine: str, world: int, elements: int) -> list[dict[str, object]]:
    """Return one row a codec."""
    from training.exchange.codecs import codec_by_name

    with tempfile.TemporaryDirectory() as folder:
        address, keep = start_coordinator(world, Path(folder))
        base = [sys.executable, __file__, "--member", engine]
        processes = [
            subprocess.Popen(
                [*base, str(rank), str(world), address, folder, str(elements)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
        rows = []
        for codec in CODECS:
            before = interface_bytes()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            counted = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
            on_wire = (interface_bytes() - before) / REPEATS
            payload = codec_by_name(codec).max_encoded_bytes(elements)
            sent = payload * 2 * (world - 1) / world
            rows.append(
                {
                    "engine": engine,
                    "members": world,
                    "codec": codec,
                    "payload": payload,
                    "theory sent": sent,
                    "counted sent / theory": max(c[0] for c in counted) / sent,
                    "counted received / theory": max(c[1] for c in counted) / sent,
                    "interface / theory": on_wire / (world * sent),
                }
            )
        for process in processes:
            process.communicate("\n")
        keep()
    return rows


def start_coordinator(world: int, folder: Path) -> tuple[str, Callable[[], object]]:
    """Start the coordinator; return its address and a function that ends it."""
    from training.exchange.links.certificates import issue_run_certificates
    from training.run.processes import CoordinatorProcess

    issue_run_certificates(folder, "bench", list(range(world)), ["127.0.0.1"])
    config = folder / "coordinator.json"
    config.write_text(
        json.dumps(
            {
                "run_id": "bench",
                "names": [f"m{rank}" for rank in range(world)],
                "certificates": str(folder / "coordinator"),
            }
        )
    )
    coordinator = CoordinatorProcess(config, (folder / "coordinator.log").open("ab"))
    lines = coordinator.lines()
    port = json.loads(next(lines))["port"]
    threading.Thread(target=list, args=(lines,), daemon=True).start()  # a full pipe would hold it up
    return f"127.0.0.1:{port}", coordinator.stop


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--member"]:
        engine, rank, world, address, secrets, elements = sys.argv[2:]
        return member(engine, int(rank), int(world), address, secrets, int(elements))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[4, 40], help="fp32 size of the vector")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if os.geteuid() == 0 and "MUSTER_BENCH_NETNS" not in os.environ:
        os.environ["MUSTER_BENCH_NETNS"] = "1"
        inner = 'ip link set lo up && exec "$@"'
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", inner, "sh", sys.executable, *sys.argv])
    rows = [
        row
        for engine in ("mesh", "nccl")
        for world in arguments.members
        for size in arguments.megabytes
        for row in measure(engine, world, int(size * 1e6 / 4))
    ]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print(
            "| " + " | ".join(f"{v:.4f}" if isinstance(v, float) and v < 100 else f"{v}" for v in row.values()) + " |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
