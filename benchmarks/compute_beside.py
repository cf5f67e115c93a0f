"""How much training is slowed while an exchange is under way: steps/s beside a mean, over steps/s without.

    .venv/bin/python benchmarks/compute_beside.py [--megabytes 40] [--turns 9] [--means 10] [--mbit 1000]

Two members. One trains a small transformer with one thread while its mean is under way in the background; the other
takes part and computes nothing, so two cores are one for training and one for the exchange of both members. A run over
the mesh (encrypted, with weights and coordinator) and stock gloo in clear take turns with training alone. Over loopback
the exchange goes as fast as the processors can, and both members want the two cores: more than any machine of a real
group meets. ``--mbit`` (as root) moves into a network namespace whose loopback carries so much each way. One minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exchange_engines import CONNECT_WITHIN, RUN, served

ENGINES = ("run", "gloo")


def training() -> Callable[[], None]:
    """Return one step of a small transformer."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-4, foreach=False)
    batch = torch.randn(8, 64, 128)

    def step() -> None:
        loss = layer(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def starter(engine: str, rank: int, address: str, secrets: str) -> Callable[[str, Any], Callable[[], bool]]:
    """Join, and return what starts a mean and says whether it is done."""
    from training.exchange.codecs import codec_by_name
    from training.exchange.group.join_config import JoinConfig
    from training.exchange.mean.mesh_member import MeshMember
    from training.exchange.mean.mesh_operations import MeshOperation

    if engine == "run":
        own = Path(secrets) / f"member-{rank}"
        exchange = MeshMember(JoinConfig(address, own, RUN, rank, 2, f"m{rank}", "127.0.0.1")).join(CONNECT_WITHIN)
        fp32 = codec_by_name("fp32")

        def start(name: str, values: Any) -> Callable[[], bool]:
            operation = exchange.start_mean(name, values, 1.0, fp32)
            assert isinstance(operation, MeshOperation)
            return operation.done

        return start
    import torch.distributed as dist

    store = dist.FileStore(address, 2)  # type: ignore[attr-defined]  # not in its list of names
    dist.init_process_group(engine, store=store, rank=rank, world_size=2)
    # asked for in the background it is never None
    return lambda _, values: dist.all_reduce(values, async_op=True).is_completed


def member(engine: str, rank: int, address: str, secrets: str) -> None:
    """Body of a member: for every line ``elements means`` exchange, and say steps/s without and beside."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch

    torch.set_num_threads(1)
    start, step = starter(engine, rank, address, secrets), training()
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        elements, means = map(int, line.split())
        values = torch.randn(elements)
        rates = []
        for beside in (False, True):
            steps, began = 0, time.perf_counter()
            if beside:
                for mean in range(means):
                    done = start(f"{number}/{mean}", values)
                    while not done():
                        if rank:
                            time.sleep(0.001)
                        else:
                            step()
                            steps += 1
            elif not rank:
                while time.perf_counter() - began < 1.0:
                    step()
                    steps += 1
            rates.append(steps / (time.perf_counter() - began))
        print(json.dumps(rates), flush=True)
    os._exit(0)  # without the engines' good-byes


def main() -> None:
    """Measure, and print the table."""
    if sys.argv[1:2] == ["--member"]:
        return member(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[40])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--means", type=int, default=10, help="of a turn, one after the other")
    parser.add_argument("--mbit", type=int, default=0, help="rate of the link each way; 0: as fast as it goes")
    arguments = parser.parse_args()
    if arguments.mbit and "MUSTER_SHAPED" not in os.environ:
        rate = f"rate {2 * arguments.mbit}mbit burst 256k latency 200ms"  # loopback carries both ways as one
        inner = f'ip link set lo up && tc qdisc add dev lo root tbf {rate} && MUSTER_SHAPED=1 exec "$@"'
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", inner, "sh", sys.executable, *sys.argv])
    with ExitStack() as stack:
        members: dict[str, list[subprocess.Popen[str]]] = {}
        for engine in ENGINES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            address = stack.enter_context(served(engine, 2, max(arguments.megabytes) * 250_000, folder))
            command = [sys.executable, __file__, "--member", engine]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started = [subprocess.Popen([*command, str(rank), address, str(folder)], **pipes) for rank in range(2)]
            members[engine] = [stack.enter_context(process) for process in started]
            for process in started:
                _answer(process)
        print("| payload | engine | training alone, steps/s | beside a mean | slowed, median (min..max) |")
        print("|---|---|---|---|---|")
        for megabytes in arguments.megabytes:
            found: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
            for _ in range(arguments.turns):
                for engine, processes in members.items():
                    for process in processes:
                        assert process.stdin is not None
                        process.stdin.write(f"{megabytes * 250_000} {arguments.means}\n")
                        process.stdin.flush()
                    rates, _ = (json.loads(_answer(process)) for process in processes)
                    found[engine].append(rates)
            for engine, turns in found.items():
                alone, beside = (statistics.median(column) for column in zip(*turns))
                slowed = [one / two for one, two in turns]
                spread = f"{statistics.median(slowed):.2f} ({min(slowed):.2f}..{max(slowed):.2f})"
                print(f"| {megabytes} MB | {engine} | {alone:.1f} | {beside:.1f} | {spread} |", flush=True)


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a member ended early; its error is above")
    return line


if __name__ == "__main__":
    main()
