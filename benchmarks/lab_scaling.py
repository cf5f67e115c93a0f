"""One, two and four small machines on the demo task: samples/s, loss at equal samples, and the same job elsewhere.

    .venv/bin/python benchmarks/lab_scaling.py [--samples 12800] [--model NAME --batch N] [--torchft PYTHON]

Needs root: the machines are lab hosts of 0.4 core each on links of 100 Mbit/s. Samples/s is taken from the members'
step events between the first steps (one whole synchronisation interval for DiLoCo) and the last: start, evaluation and
the model's saving are left out, every synchronisation is in. Supervisor and coordinator run on the controller, outside
the quotas and behind a link that is not shaped; so does the lighthouse of torchft. torchrun keeps its store on a host.
About a quarter of an hour; as long with ``--race 2.5 2``, which compares loss over time instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ideal_times
from lab_runs import BenchLab, write_rows
from local_runs import Measured

from profiles.files.resolve import load_profile
from training.tasks.registry import task_from_profile

NAMES = ("a", "b", "c", "d")
ALONE = "alone"
"""A host that trains by itself beside a group."""
BATCH = 16
INTERVAL = 50
OVERLAP = 5
"""``sync_delay`` of the overlapped rows."""
RACE, SMOOTHED = 20, 20
"""Interval of the runs whose losses are compared over time, and steps over which these are means."""
PEERS = Path(__file__).resolve().parent / "peers"
COMMON = {
    "eval_interval": 0,
    "eval_before": "false",
    "eval_generate": "false",
    "max_eval_samples": 320,
    "snapshot_interval": 0,
    "threads": 1,
}


class Scaling:
    """The rows of the table, one run each."""

    def __init__(self, lab: BenchLab, arguments: argparse.Namespace) -> None:
        self.lab = lab
        self.samples = arguments.samples
        self.batch = arguments.batch
        self.bucket_mb = arguments.bucket_mb
        self.common = COMMON | {"batch_size": self.batch} | ({"model": arguments.model} if arguments.model else {})
        self.weights = weights_of(self.common)
        self.rows: list[dict[str, Any]] = []
        self.single: Measured | None = None
        self.compute = 0.0
        self.skip = INTERVAL

    def options(self, steps: int) -> dict[str, Any]:
        """The demo with a course of the learning rate that fits ``steps``."""
        return self.common | {"max_steps": steps, "warmup_steps": max(1, steps // 10)}

    def prepare(self) -> None:
        """Fill the caches of all hosts."""
        self.lab.train(self.lab.names, "demo-scratch", self.options(1) | {"strategy": "allreduce"})

    def one_host(self) -> None:
        """The run that all ratios are to: plain training."""
        steps = self.samples // self.batch
        self.skip = min(INTERVAL, steps // 4)
        self.single = self.train(1, steps, {"strategy": "allreduce"})
        self.compute = self.batch / self.single.samples_per_second(self.skip)
        self.add("one host", 1, 100, self.single, self.skip, self.compute)

    def side_by_side(self, members: int) -> None:
        """Hosts that train at the same time and never exchange: what this machine's cores allow at most."""
        steps = 2 * INTERVAL
        run = self.train(members, steps, {"strategy": "diloco", "sync_interval": 10 * steps})
        self.add("no exchange", members, 100, run, INTERVAL, self.compute)

    def diloco(self, members: int, delay: int = 0) -> None:
        """``delay``: steps that go on while an exchange is under way."""
        options = {"strategy": "diloco", "sync_interval": INTERVAL, "codec": "mxfp4"}
        run = self.train(members, self.samples // self.batch // members, options | {"sync_delay": delay})
        exchange = 0.0 if delay else ideal_times.ring(ideal_times.payload_bytes(self.weights, "mxfp4"), members, 100)
        predicted = ideal_times.periodic_step(self.compute, exchange, INTERVAL)
        overlap = f", sync_delay {delay}" if delay else ""
        self.add(f"diloco H={INTERVAL} mxfp4{overlap}", members, 100, run, INTERVAL, predicted)

    def train(self, members: int, steps: int, options: dict[str, Any]) -> Measured:
        return self.lab.train(NAMES[:members], "demo-scratch", self.options(steps) | options)

    def allreduce(self, members: int, mbit: float, steps: int, skip: int) -> None:
        self.lab.mbit = mbit
        options = {"strategy": "allreduce", "codec": "bf16"}
        run = self.train(members, steps, options | ({"bucket_mb": self.bucket_mb} if self.bucket_mb else {}))
        size = ideal_times.payload_bytes(self.weights, "bf16")
        exchange = ideal_times.ring(size, members, mbit)
        buckets = f", bucket_mb {self.bucket_mb:g}" if self.bucket_mb else ""
        self.add(f"allreduce bf16{buckets}", members, mbit, run, skip, ideal_times.per_step(self.compute, exchange))
        self.lab.mbit = 100

    def ddp(self, members: int, mbit: float, steps: int, skip: int) -> None:
        """``torchrun``, one node a host; its store is on the first host, as usual."""
        self.lab.mbit = mbit
        run = self.run_ddp(members, self.options(steps))
        exchange = ideal_times.ring(ideal_times.payload_bytes(self.weights, "fp16"), members, mbit)
        predicted = ideal_times.per_step(self.compute, exchange)
        self.add("torchrun: DDP fp16, gloo", members, mbit, run, skip, predicted)
        self.lab.mbit = 100

    def run_ddp(self, members: int, given: dict[str, Any]) -> Measured:
        options, commands = json.dumps({key: str(value) for key, value in given.items()}), {}
        for rank, name in enumerate(NAMES[:members]):
            where = ["--master-addr", self.lab.lab[NAMES[0]].address, "--master-port", "29511"]
            run = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={members}", f"--node-rank={rank}", *where]
            program = [*run, str(PEERS / "ddp_torchrun.py"), "--options", options]
            commands[name] = ["env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", *program]
        return self.lab.run_programs(commands, given["max_steps"])

    def torchft(self, members: int, python: Path) -> None:
        """torchft's DiLoCo, one replica group a host; the lighthouse is on the controller."""
        run = self.run_torchft(members, self.options(self.samples // self.batch // members), INTERVAL, python)
        exchange = ideal_times.ring(ideal_times.payload_bytes(self.weights, "fp32"), members, 100)
        predicted = ideal_times.periodic_step(self.compute, exchange, INTERVAL)
        self.add(f"torchft: DiLoCo H={INTERVAL} fp32, gloo", members, 100, run, INTERVAL, predicted)

    def run_torchft(self, members: int, given: dict[str, Any], interval: int, python: Path) -> Measured:
        options = json.dumps({key: str(value) for key, value in given.items()})
        with lighthouse(python, self.lab.lab.address, members) as address:
            commands = {}
            for rank, name in enumerate(NAMES[:members]):
                program = [str(python), str(PEERS / "diloco_torchft.py"), "--rank", str(rank), "--world", str(members)]
                own = ["--address", self.lab.lab[name].address, "--lighthouse", address, "--options", options]
                environment = ["env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1"]
                commands[name] = [*environment, *program, *own, "--interval", str(interval)]
            return self.lab.run_programs(commands, given["max_steps"])

    def race(self, members: int, losses: list[float], only: str, python: Path | None) -> None:
        """Every program with as many samples, and when the training loss first comes down to some values."""
        steps = self.samples // self.batch // members
        often, given = max(1, steps // 100), self.options(steps)
        # As the product does: a rate for the batch of all where gradients are averaged, and for one's own else.
        ddp, own = given | {"lr_scaling": "sqrt"}, given | {"lr_scaling": "off"}

        def ours(strategy: str, **more: Any) -> Callable[[], Measured]:
            return lambda: self.train(members, steps, {"strategy": strategy, **more})

        ways: dict[str, Callable[[], Measured]] = {
            "`allreduce` bf16": ours("allreduce", codec="bf16"),
            f"`diloco` H={RACE} mxfp4": ours("diloco", sync_interval=RACE),
            f"`streaming_diloco` H={RACE} mxfp4": ours("streaming_diloco", sync_interval=RACE),
            "`demo`": ours("demo"),
            f"`sparseloco` H={often}": ours("sparseloco", sync_interval=often),
            "torchrun: DDP fp16": lambda: self.run_ddp(members, ddp),
        }
        if python is not None:
            ways[f"torchft: DiLoCo H={RACE} fp32"] = lambda: self.run_torchft(members, own, RACE, python)
        for name, run in ways.items():
            if only in name:
                self.add_race(name, members, run(), losses)

    def add_race(self, name: str, members: int, run: Measured, losses: list[float]) -> None:
        course = course_of(run, members)
        row = {
            "program": name,
            "ms a step": f"{1000 * course[-1][0] / len(course):.0f}",
            **{f"s to {loss:g}": first_below(course, loss) for loss in losses},
            "s in all": f"{course[-1][0]:.0f}",
            "training loss": f"{course[-1][1]:.3f}",
            "validation loss": f"{run.final_loss():.3f}",
            "load": f"{os.getloadavg()[0]:.0f}",
        }
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)

    def add(self, name: str, members: int, mbit: float, run: Measured, skip: int, predicted: float) -> None:
        """Note a run."""
        steps = [e for rank in range(members) for e in run.steps(rank) if e.step > skip]
        speed = run.samples_per_second(skip)
        assert self.single is not None
        row = {
            "case": name,
            "hosts": members,
            "Mbit/s": f"{mbit:g}",
            "samples/s": f"{speed:.1f}",
            "ratio to one host": f"{speed / self.single.samples_per_second(self.skip):.2f}",
            "predicted": f"{members * self.compute / predicted:.2f}",
            "compute, ms a step": f"{1000 * statistics.fmean(e.compute for e in steps):.0f}",
            "wait, ms a step": f"{1000 * statistics.fmean(e.wait for e in steps):.1f}",
            "samples": sum(e.samples for rank in range(members) for e in run.steps(rank)),
            "validation loss": f"{run.final_loss():.4f}",
        }
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)


def course_of(run: Measured, members: int) -> list[tuple[float, float]]:
    """Return, for every step, when its last member had ended it and the mean loss of all over the last steps."""
    each = [run.steps(rank) for rank in range(members)]
    begin = min(steps[0].time - steps[0].seconds for steps in each)
    losses = [statistics.fmean(e.loss for e in step) for step in zip(*each, strict=True)]
    times = [max(e.time for e in step) - begin for step in zip(*each, strict=True)]
    return [(t, statistics.fmean(losses[max(0, i - SMOOTHED + 1) : i + 1])) for i, t in enumerate(times)]


def first_below(course: list[tuple[float, float]], loss: float) -> str:
    return next((f"{seconds:.0f}" for seconds, at in course if at <= loss), "-")


def weights_of(options: dict[str, Any]) -> int:
    """Count the parameters of the model."""
    profile = load_profile("demo-scratch", {key: str(value) for key, value in options.items()}).profile
    task = task_from_profile(profile)
    task.prepare(lambda *_: None)
    return sum(parameter.numel() for parameter in task.build_model().parameters() if parameter.requires_grad)


@contextlib.contextmanager
def lighthouse(python: Path, address: str, members: int) -> Iterator[str]:
    """torchft's lighthouse, for one job."""
    program = [str(python.with_name("torchft_lighthouse")), "--bind", "[::]:29510", "--min_replicas", str(members)]
    process = subprocess.Popen([*program, "--join_timeout_ms", "1000"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}:29510"
    finally:
        process.kill()
        process.wait()


def run_cases(scaling: Scaling, arguments: argparse.Namespace) -> None:
    """One host first: all ratios are to it."""
    scaling.one_host()
    if "diloco" in arguments.parts:
        for members in arguments.hosts:
            scaling.diloco(members)
            scaling.diloco(members, OVERLAP)
            scaling.side_by_side(members)
    per_step = [(mbit, members) for mbit in arguments.mbit for members in arguments.hosts]
    for mbit, members in per_step:
        if "allreduce" in arguments.parts:
            scaling.allreduce(members, mbit, arguments.steps, arguments.steps // 4)
        if "peers" in arguments.parts:
            attempt(scaling.ddp, members, mbit, arguments.steps, arguments.steps // 4)
    for members in arguments.hosts if "peers" in arguments.parts and arguments.torchft else ():
        attempt(scaling.torchft, members, arguments.torchft)


def run_turns(scaling: Scaling, turns: int, hosts: list[int]) -> None:
    """DiLoCo's speed alone, in so many turns."""
    ratios = {members: [ratio_beside(scaling, members) for _ in range(turns)] for members in hosts}
    for members, found in ratios.items():
        spread = f"({min(found):.2f}..{max(found):.2f})"
        scaling.rows.append(
            {
                "case": f"diloco H={INTERVAL} mxfp4",
                "hosts": members,
                "to one host, median (min..max)": f"{statistics.median(found):.2f} {spread}",
                "turns": turns,
            }
        )


def ratio_beside(scaling: Scaling, members: int) -> float:
    """Samples/s of some hosts over those of one more host that trains alone in the same seconds.

    One machine is not equally fast all the time, and a run before or after would meet another one.
    """
    steps = 3 * INTERVAL
    diloco = {"strategy": "diloco", "sync_interval": INTERVAL, "codec": "mxfp4"}
    with ThreadPoolExecutor(1) as pool:
        single = pool.submit(scaling.lab.train, [ALONE], "demo-scratch", scaling.options(2 * steps))
        run = scaling.train(members, steps, diloco)
        alone = single.result()
    measured = [e for rank in range(members) for e in run.steps(rank) if e.step > INTERVAL]
    begin = max(e.time for rank in range(members) for e in run.steps(rank) if e.step == INTERVAL)
    end = max(e.time for e in measured)
    rate = sum(e.samples for e in measured) / (end - begin)
    inside = [e for e in alone.steps(0) if begin <= e.time <= end]
    rate_alone = sum(e.samples for e in inside[1:]) / (inside[-1].time - inside[0].time)
    wait = 1000 * statistics.fmean(e.wait for e in measured)
    print(f"{members}: {rate:.1f} beside {rate_alone:.1f} samples/s, {wait:.1f} ms wait a step", file=sys.stderr)
    return rate / rate_alone


def attempt(case: Callable[..., None], *arguments: Any) -> None:
    """Run a case of another program; that it fails must not cost the rows of the others."""
    try:
        case(*arguments)
    except SystemExit as error:
        print(f"{case.__name__}{arguments}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """Run all cases in one lab and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12_800, help="samples of the runs whose losses are compared")
    parser.add_argument("--model", default="", help="another one of config.ini, for example scratch")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a member's step")
    parser.add_argument("--steps", type=int, default=80, help="steps of the per-step runs")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000], help="links of the per-step runs")
    parser.add_argument("--bucket-mb", type=float, default=0, help="of the per-step runs; 0: the default")
    parser.add_argument("--cores", type=float, default=0.4)
    parser.add_argument("--parts", nargs="+", default=["diloco", "allreduce", "peers"], help="which cases")
    parser.add_argument("--turns", type=int, default=0, help="DiLoCo's speed only, so often, beside one host")
    parser.add_argument("--race", type=float, nargs="+", help="training losses: when each program comes down to them")
    parser.add_argument("--only", default="", help="of the race: programs with this in their name")
    parser.add_argument("--torchft", type=Path, help="Python of an environment with torchft")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = [*NAMES[: max(arguments.hosts)], *([ALONE] if arguments.turns else [])]
    with BenchLab(names, arguments.cores, 100) as lab:
        scaling = Scaling(lab, arguments)
        scaling.prepare()
        try:
            if arguments.race:
                scaling.race(max(arguments.hosts), arguments.race, arguments.only, arguments.torchft)
            elif arguments.turns:
                run_turns(scaling, arguments.turns, arguments.hosts)
            else:
                run_cases(scaling, arguments)
        finally:
            write_rows(scaling.rows, arguments.json)


if __name__ == "__main__":
    main()
