"""Seconds for one mean over all members: the mesh as a process group and as a run uses it, with weights, codec and
coordinator (each encrypted and in clear; a run with `transport = tls` too), and a stock gloo all-reduce.

    .venv/bin/python benchmarks/exchange_engines.py [--members 2 3 4] [--kilobytes 4 100 1000 10000 40000 400000]
                                                    [--codec fp32] [--engines mesh run gloo] [--busy 4]
                                                    [--json FILE]

Members are processes on this machine and talk over loopback, one thread each, so everything shares the processors. The
engines take turns on every payload within one run: the load of the machine is the same for all, and the ratios mean
more than the seconds. A stock all-reduce neither encrypts nor weighs, and needs all members alive. ``--busy`` runs so
many loops beside them that want a whole processor each, as training does. *Switches* are the times that threads of all
members wait, for one another or for the network. About six minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ENGINES = ("mesh", "mesh in clear", "run", "run in clear", "run through TLS", "gloo")
STOCK = {"mesh": "muster", "mesh in clear": "muster", "gloo": "gloo"}
"""Backend of ``torch.distributed``."""
RUN = "bench"
CONNECT_WITHIN = 60.0
LARGEST_MEMBERS_TIMES_BYTES = 2_000_000_000
"""Above this a machine with little memory would measure its swap."""


def exchange_of(engine: str, rank: int, world: int, address: str, secrets: str, codec: str) -> Callable[..., object]:
    """Join through one engine and return ``mean(name, values)``."""
    import torch

    from training.exchange.codecs import codec_by_name

    if engine in STOCK:
        backend = STOCK[engine]
        if engine == "mesh":
            os.environ.update(MUSTER_CERTIFICATES=f"{secrets}/member-{rank}", MUSTER_RUN_ID=RUN)
        if backend == "muster":
            import training.exchange.torch_backend.process_group  # noqa: F401 - registers the backend
        store = torch.distributed.FileStore(address, world)  # type: ignore[attr-defined]  # not in its list of names
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
        kept = torch.empty(0)

        def mean(name: str, values: torch.Tensor) -> None:
            nonlocal kept
            if kept.shape != values.shape:
                kept = torch.empty_like(values)
            torch.distributed.all_reduce(kept.copy_(values))  # fresh memory would cost as much as an exchange

        return mean
    from training.exchange.group.join_config import JoinConfig
    from training.exchange.mean.mesh_member import MeshMember

    own = None if engine == "run in clear" else Path(secrets) / f"member-{rank}"
    listen, shards = os.environ.get("MUSTER_LISTEN", "127.0.0.1"), json.loads(os.environ.get("BENCH_SHARES", "[]"))
    exchange = MeshMember(
        JoinConfig(
            address,
            own,
            RUN,
            rank,
            world,
            f"m{rank}",
            listen,
            shards=dict(enumerate(shards)),
            transport="tls" if engine == "run through TLS" else "auto",
        )
    ).join(CONNECT_WITHIN)
    chosen = codec_by_name(codec)
    return lambda name, values: exchange.mean(name, values, 1.0, chosen)


def member(engine: str, rank: int, world: int, address: str, secrets: str, codec: str) -> None:
    """Body of one member: for every line ``elements repeats`` exchange, and say the seconds."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch

    torch.set_num_threads(1)
    mean = exchange_of(engine, rank, world, address, secrets, codec)
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        elements, repeats = map(int, line.split())
        values = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
        mean(f"{number}/first", values)
        seconds = []
        worked, waits = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        for repeat in range(repeats):
            start = time.perf_counter()
            mean(f"{number}/{repeat}", values)
            seconds.append(time.perf_counter() - start)
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits
        print(json.dumps([seconds, (time.process_time() - worked) / repeats, waits / repeats]), flush=True)
    os._exit(0)  # without the engines' good-byes


class Members:
    """The member processes of one engine; ``prefixes`` go before each one's command."""

    def __init__(
        self,
        engine: str,
        world: int,
        address: str,
        secrets: Path,
        codec: str,
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        command = [sys.executable, __file__, "--member", engine]
        self._processes = [
            subprocess.Popen(
                [*(prefixes[rank] if prefixes else ()), *command, str(rank), str(world), address, str(secrets), codec],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        for process in self._processes:
            self._answer(process)

    def measure(self, elements: int, repeats: int) -> tuple[float, float, float]:
        """Return the median over the repeats of the slowest member's seconds, and all members' processor seconds and
        switches for one mean."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{elements} {repeats}\n")
            process.stdin.flush()
        answers: list[tuple[list[float], float, float]] = [
            json.loads(self._answer(process)) for process in self._processes
        ]
        slowest = statistics.median(max(one) for one in zip(*(seconds for seconds, _, _ in answers)))
        return slowest, sum(worked for _, worked, _ in answers), sum(waits for _, _, waits in answers)

    def close(self) -> None:
        for process in self._processes:
            process.communicate()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a member ended early; its error is above")
        return line


@contextmanager
def served(engine: str, world: int, elements: int, folder: Path, at: str = "127.0.0.1") -> Iterator[str]:
    """Start what the engine's members meet at, and yield its address."""
    from training.exchange.links.certificates import issue_run_certificates

    if engine in STOCK:
        if engine == "mesh":
            issue_run_certificates(folder, RUN, range(world), [at])
        yield str(folder / "store")
    else:
        with coordinator(config_of(engine, world, folder, at), folder) as port:
            yield f"{at}:{port}"


def config_of(engine: str, world: int, folder: Path, at: str) -> dict[str, Any]:
    from training.exchange.links.certificates import issue_run_certificates

    config: dict[str, Any] = {"run_id": RUN, "names": [f"m{rank}" for rank in range(world)], "address": at}
    if engine != "run in clear":
        issue_run_certificates(folder, RUN, range(world), [at])
        config["certificates"] = str(folder / "coordinator")
    return config


@contextmanager
def coordinator(config: dict[str, Any], folder: Path) -> Iterator[int]:
    (folder / "coordinator.json").write_text(json.dumps(config))
    program = "training.exchange.group.coordinator_main"
    command = [sys.executable, "-m", program, "--config", str(folder / "coordinator.json")]
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["port"]
        process.communicate()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many processors busy, if there are that many."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(
    world: int, sizes: list[int], codec: str, seconds: float, engines: Sequence[str], busy: int
) -> list[dict[str, Any]]:
    """Return a row for every payload; engines take turns."""
    rows = []
    with ExitStack() as stack:
        members = {}
        for engine in engines:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            address = stack.enter_context(served(engine, world, max(sizes) // 4, folder))
            members[engine] = Members(engine, world, address, folder, codec)
            stack.callback(members[engine].close)
        stack.enter_context(busy_loops(busy))
        for size in sizes:
            if size * world > LARGEST_MEMBERS_TIMES_BYTES:
                continue
            repeats = max(3, min(200, int(seconds * 4e8 / (size * world + 4e5))))
            row: dict[str, Any] = {"members": world, "bytes": size, "repeats": repeats}
            for engine in engines:
                figures = members[engine].measure(size // 4, repeats)
                row |= zip((engine, f"{engine}, processor", f"{engine}, switches"), figures)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]], engines: Sequence[str]) -> str:
    """Return the rows as a Markdown table; ratios are to gloo where it takes part."""
    others = [engine for engine in engines if engine != "gloo"] if "gloo" in engines else []
    head = [
        "members",
        "payload",
        *(f"{engine}, ms" for engine in engines),
        *(f"{engine} / gloo" for engine in others),
        *(f"processor, {engine} / gloo" for engine in others),
        *(f"switches, {engine}" for engine in engines),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    for row in rows:
        payload = f"{row['bytes'] / 1e6:g} MB" if row["bytes"] >= 1e6 else f"{row['bytes'] / 1e3:g} kB"
        cells = [str(row["members"]), payload, *(f"{1e3 * row[engine]:.2f}" for engine in engines)]
        cells += [f"{row[engine] / row['gloo']:.2f}" for engine in others]
        cells += [f"{row[f'{engine}, processor'] / row['gloo, processor']:.2f}" for engine in others]
        cells += [f"{row[f'{engine}, switches']:.0f}" for engine in engines]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    if sys.argv[1:2] == ["--member"]:
        engine, rank, world, address, secrets, codec = sys.argv[2:]
        return member(engine, int(rank), int(world), address, secrets, codec)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[4, 100, 1000, 10_000, 40_000, 400_000])
    parser.add_argument("--codec", default="fp32", help="of a run; the others always send fp32")
    parser.add_argument("--seconds", type=float, default=3.0, help="about as long for one engine and payload")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--busy", type=int, default=0, help="loops beside the members")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = [1000 * size for size in arguments.kilobytes]
    settings = arguments.codec, arguments.seconds, arguments.engines, arguments.busy
    rows = [row for world in arguments.members for row in measure(world, sizes, *settings)]
    print(table(rows, arguments.engines))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"codec": arguments.codec, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
