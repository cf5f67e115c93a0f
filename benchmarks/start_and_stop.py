"""Seconds from the command to the first step of a run on three lab hosts, from ``stop`` to nothing left, and where
they go.

    .venv/bin/python benchmarks/start_and_stop.py [--strategy auto] [--repeats 3] [--profiles demo nanogpt] [--hosts 3]
    .venv/bin/python benchmarks/start_and_stop.py --cold --strategy auto --profiles demo-scratch

Needs root and Linux: the hosts are network namespaces with an sshd each (``tests/lab``), and share the processors of
this machine, so its CPU seconds are shown beside the wall time. The hosts are prepared: a run before the first counted
one has brought code and data there; with ``--cold`` every run has new hosts, to which nothing was brought and of which
nothing is known, so ``auto`` measures and plans first. The command is the real one, in a process of its own, without a
terminal. CPU seconds are those of the whole machine: run nothing else meanwhile. About two minutes.
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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.lab.lab import Lab
from training.records.events import Event, RunEvent, SnapshotEvent, StepEvent, TimingEvent
from training.records.run_folder import RunFolder
from training.records.runs import find_run

PATIENCE = 180.0
STEPS_BEFORE_STOP = 3
OPTIONS = ("--threads", "1", "--no-eval-before", "--snapshot-interval", "100000")


@dataclass(frozen=True)
class Start:
    """One start: seconds after the command."""

    first_step: float
    """Until every member has done its first step."""
    cpu: float
    """Seconds of all processors of this machine."""
    parts: dict[str, tuple[float, float, float]]
    """Begin and end after the command, and CPU seconds, by part; the slowest machine stands for all."""


@dataclass(frozen=True)
class Stop:
    """One stop: seconds of its parts, one after the other."""

    total: float
    cpu: float
    parts: dict[str, float]
    left: dict[str, list[str]]
    """Processes that are still there, by machine."""


def busy_seconds() -> float:
    """CPU seconds that all processors of this machine have worked since it booted."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Commands:
    """The command line, in a folder of its own; byte code is kept, as it is where nothing forbids it."""

    def __init__(self, folder: Path, hosts_file: Path, strategy: str) -> None:
        self.output = folder / "output"
        self._hosts_file = hosts_file
        self._strategy = strategy
        dropped = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        self._environment = {**kept, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}

    def run(self, *words: str) -> str:
        command = [sys.executable, str(REPOSITORY / "cli_typer.py"), *words, "--output", str(self.output)]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, timeout=PATIENCE)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def train(self, profile: str) -> Path:
        """Start a run in the background and return its folder."""
        words = ["distributed-train", profile, "--hosts", str(self._hosts_file), "--detach", *OPTIONS]
        return find_run(self.output, self.run(*words, "--no-input", "--strategy", self._strategy).strip())


def events_of(run: Path) -> list[Event]:
    return list(RunFolder.open(run).events())


def steps(events: Iterable[Event], at_least: int = 1) -> dict[int | None, StepEvent]:
    """The first event of every member at or after a step."""
    found: dict[int | None, StepEvent] = {}
    for event in events:
        if isinstance(event, StepEvent) and event.step >= at_least:
            found.setdefault(event.member, event)
    return found


def wait_for_step(run: Path, members: int, step: int) -> None:
    end = time.monotonic() + PATIENCE
    while len(steps(events_of(run), step)) < members:
        if time.monotonic() > end or (run / "metrics.json").exists():
            raise SystemExit(f"{run}: no step {step}: {[e for e in events_of(run) if e.kind in ('error', 'warning')]}")
        time.sleep(0.2)


def measure_start(commands: Commands, profile: str) -> tuple[Path, Start]:
    """Start a run and return its folder and what its first step took."""
    busy, begin = busy_seconds(), time.time()
    run = commands.train(profile)
    wait_for_step(run, RunFolder.open(run).plan().world_size, 1)
    events = events_of(run)
    first = max(event.time for event in steps(events).values())
    return run, Start(first - begin, busy_seconds() - busy, parts_of(events, begin))


def parts_of(events: Iterable[Event], begin: float) -> dict[str, tuple[float, float, float]]:
    parts: dict[str, tuple[float, float, float]] = {}
    for event in events:
        if isinstance(event, TimingEvent):
            end = event.time - begin
            known = parts.get(event.part, (end, 0.0, 0.0))
            parts[event.part] = (
                min(known[0], end - event.seconds), max(known[1], end), known[2] + (event.cpu or 0.0)
            )  # fmt: skip
    return dict(sorted(parts.items(), key=lambda item: item[1][0]))


def measure_stop(commands: Commands, run: Path) -> Stop:
    """Stop a run and return what it took until every machine has said that nothing is left."""
    busy, begin = busy_seconds(), time.time()
    said: dict[str, Any] = json.loads(commands.run("stop", run.name[:20], "--json"))
    end, spent = time.time(), busy_seconds() - busy
    events = [event for event in events_of(run) if event.time >= begin]
    moments = {
        "command": said["asked"],
        "to the last snapshot": max((e.time for e in events if isinstance(e, SnapshotEvent)), default=begin),
        "workers end": next(e.time for e in events if isinstance(e, RunEvent) and e.status == "cancelled"),
        "supervisor ends": said["ended"],
        "proof": said["proved"],
        "command ends": end,
    }
    parts, before = {}, begin
    for name, moment in moments.items():
        parts[name], before = moment - before, moment
    return Stop(end - begin, spent, parts, said["left"])


def show(profile: str, starts: list[Start], stops: list[Stop]) -> None:
    print(f"\n{profile}: {len(starts)} starts, {len(stops)} stops; seconds, medians")
    print(f"{'command to first step':28} {_median(s.first_step for s in starts):6.2f}   "
          f"(worst {max(s.first_step for s in starts):.2f}, CPU {_median(s.cpu for s in starts):.1f})")  # fmt: skip
    print(f"    {'part':24} {'begin':>6} {'end':>6} {'takes':>6} {'CPU':>6}")
    for name in starts[-1].parts:
        rows = [start.parts[name] for start in starts if name in start.parts]
        begin, end, cpu = (_median(column) for column in zip(*rows))
        print(f"    {name:24} {begin:6.2f} {end:6.2f} {end - begin:6.2f} {cpu:6.2f}")
    print(f"{'stop to nothing left':28} {_median(s.total for s in stops):6.2f}   "
          f"(worst {max(s.total for s in stops):.2f}, CPU {_median(s.cpu for s in stops):.1f})")  # fmt: skip
    for name in stops[-1].parts:
        print(f"    {name:24} {_median(stop.parts[name] for stop in stops):6.2f}")
    print(f"    left on the machines: {stops[-1].left}", flush=True)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def measure(arguments: argparse.Namespace, profile: str) -> Iterator[tuple[Start, Stop]]:
    """Every counted start and stop; the uncounted one before them is left out where hosts are new each time."""
    for _ in range(arguments.repeats if arguments.cold else 1):
        with Lab(*(f"host{n}" for n in range(arguments.hosts))) as lab, tempfile.TemporaryDirectory() as folder:
            commands = Commands(Path(folder), lab.hosts_file, arguments.strategy)
            for counted in [True] if arguments.cold else [False] + [True] * arguments.repeats:
                run, start = measure_start(commands, profile)
                wait_for_step(run, RunFolder.open(run).plan().world_size, STEPS_BEFORE_STOP)
                stop = measure_stop(commands, run)
                if counted:
                    yield start, stop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--strategy", default="allreduce", help="auto: planned from figures of the run before")
    parser.add_argument("--profiles", nargs="+", default=["demo-scratch", "nanogpt"])
    parser.add_argument("--cold", action="store_true", help="new hosts for every run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for profile in arguments.profiles:
        runs = list(measure(arguments, profile))
        starts, stops = [start for start, _ in runs], [stop for _, stop in runs]
        show(profile, starts, stops)
        figures[profile] = {"starts": [asdict(start) for start in starts], "stops": [asdict(s) for s in stops]}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
