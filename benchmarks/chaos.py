"""A run on lab hosts to which one thing after the other happens, by chance, and what is left of it at its end.

    python benchmarks/chaos.py [--seconds 600] [--seed 1] [--hosts 4] [--strategy allreduce] [FAULT ...]

Needs root on Linux. A small model with waits in its steps trains over network namespaces with real SSH servers. Every
few seconds a fault befalls a host, or the computer that started the run: processes are killed, frozen or starved,
cables cut, machines turned off, dropped and added. The same seed draws the same faults. After each, the host must train
with the others again; where nothing but a request brings it back, it is made. In the end

- the run is completed, and its validation loss is that of the same run without faults, but for a tenth;
- with ``allreduce``, every sample of every whole pass over the data counted once, by the ids that the hosts have
  written down while they trained;
- all members that compared their weights after the same step had the same;
- no member has a step twice or out of order, no loss is told twice, no step is nobody's;
- 45 seconds later no process of the run is left, here or on a host.

What does not hold is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.link_faults import befallen
from tests.distributed.muster_runs import Muster, ours
from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.processes import line_of, signal_all
from tests.lab.spec import HostSpec
from training.records.events import EvaluationEvent, Event, MemberEvent, RequestEvent, StepEvent, SyncEvent
from training.run.processes import processes_of

SAMPLES = 600
JOB = """
import json, os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training.tasks.custom import CustomJob

LOG = []

def build():
    points = torch.rand({samples}, 2, generator=torch.Generator().manual_seed(1))
    labels = torch.stack(((points.sum(dim=1) > 1).long(), torch.arange({samples})), dim=1)
    return CustomJob(nn.Linear(2, 2), TensorDataset(points, labels), TensorDataset(points[:60], labels[:60]), loss)

def loss(scores, labels):
    if scores.requires_grad:
        if not LOG:
            folder = Path.home() / "ids"
            folder.mkdir(exist_ok=True)
            LOG.append(open(folder / f"{{time.time():.6f}}.jsonl", "a", buffering=1))
        LOG[0].write(json.dumps([time.time(), labels[:, 1].tolist()]) + chr(10))
        time.sleep({pause})
    return nn.functional.cross_entropy(scores, labels[:, 0])
"""
"""Each process of a host writes the samples of each pass into a file that is named after its beginning."""
_PAUSE = 0.04
_STEPS_A_SECOND = 12
"""By which the steps of a run of some seconds are counted, with its faults."""
_BY_ITSELF, _PATIENCE = 45.0, 180.0
"""Seconds in which a machine comes back by itself, before it is added; and in all."""
_STAYS_OUT = {"drop": 0.0, "worker": 3.0}
"""Seconds after which a machine is added that only a request brings back, by what has befallen it."""
_OPTIONS = {"allreduce": ["--verify-interval", "1"], "diloco": ["--sync-interval", "10"]}
_TOLERANCE = 0.1
_LEASE = 45.0
"""Seconds after the end in which an agent that could not be reached then has ended itself."""


class Chaos:
    """A run, and the faults that can befall it.

    Args:
        steps: of the run.
    """

    def __init__(self, lab: Lab, folder: Path, strategy: str, steps: int, dice: random.Random) -> None:
        self.lab, self.dice, self.strategy, self.steps = lab, dice, strategy, steps
        self.hosts = list(lab)
        self.muster = Muster(folder, lab.hosts_file)
        self.run_id = ""
        self.begun = time.monotonic()

    def start(self, pause: float = _PAUSE) -> None:
        self.muster.job.write_text(JOB.format(samples=SAMPLES, pause=pause))
        words = ["--max-steps", str(self.steps), "--strategy", self.strategy, "--no-eval-before"]
        self.run_id = self.muster.detach(*words, *_OPTIONS.get(self.strategy, []))

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begun:6.1f} s, step {self.newest}: {text}", flush=True)

    # ---------------------------------------------------------------------------------------------- what is known

    @property
    def events(self) -> list[Event]:
        return self.muster.events(self.run_id)

    @property
    def newest(self) -> int:
        return max((event.step for event in self.events if isinstance(event, StepEvent)), default=0)

    @property
    def has_ended(self) -> bool:
        return self.muster.metadata(self.run_id)["status"] in ("completed", "failed", "cancelled")

    def is_with_the_others(self, rank: int, since: float) -> bool:
        """Whether a member has had a result with all others since a moment."""
        everybody = list(range(len(self.hosts)))
        for event in reversed(self.events):
            if event.time < since:
                return False
            if isinstance(event, SyncEvent) and event.member == rank:
                return event.members == everybody or self.strategy == "async_diloco"
        return False

    # --------------------------------------------------------------------------------------------- what befalls it

    def kill(self, host: LabHost, *texts: str, number: int = signal.SIGKILL) -> None:
        signal_all(host.pids(*texts), number)

    def worker(self, host: LabHost) -> None:
        self.kill(host, "training.workers.worker")

    def agent(self, host: LabHost) -> None:
        self._kill_agents(host, is_guard=False)

    def guard(self, host: LabHost) -> None:
        self._kill_agents(host, is_guard=True)

    def _kill_agents(self, host: LabHost, is_guard: bool) -> None:
        agents = host.pids("agent.py")
        for pid in agents:
            with contextlib.suppress(psutil.Error):
                if (psutil.Process(pid).ppid() in agents) == is_guard:
                    os.kill(pid, signal.SIGKILL)

    def sshd(self, host: LabHost) -> None:
        self.kill(host, "sshd")
        time.sleep(self.dice.uniform(1, 8))
        host.start_sshd()

    def power(self, host: LabHost) -> None:
        host.kill()
        time.sleep(self.dice.uniform(1, 8))
        host.boot()

    def coordinator(self, host: LabHost) -> None:
        name = "training.exchange.group.coordinator_main"
        for process in processes_of(self.run_id):
            if name in line_of(process.pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for other in self.hosts:
            self.kill(other, name)

    def supervisor(self, host: LabHost) -> None:
        signal_all([pid for pid in [self.muster.supervisor(self.run_id)] if pid], signal.SIGKILL)

    def drop(self, host: LabHost) -> None:
        self.muster.run("runs", "ask", self.run_id, "drop", host.name)

    def slowed(self, host: LabHost) -> None:
        host.set_cores(0.15)
        time.sleep(self.dice.uniform(4, 10))
        host.set_cores(_CORES)

    def snapshot(self, host: LabHost) -> None:
        self.muster.run("runs", "ask", self.run_id, "snapshot")

    def link(self, kind: str, host: LabHost) -> None:
        with befallen(host, kind):
            time.sleep(self.dice.uniform(2, 14))

    @property
    def faults(self) -> dict[str, Callable[[LabHost], None]]:
        kinds = ("worker", "agent", "guard", "sshd", "power", "coordinator", "supervisor", "drop", "slowed", "snapshot")
        links = ("cut", "deaf", "mute", "frozen", "slow")
        return {kind: getattr(self, kind) for kind in kinds} | {
            kind: lambda host, kind=kind: self.link(kind, host) for kind in links
        }

    def befall(self, kind: str, host: LabHost) -> str:
        """Let a fault pass and the host come back; return what went wrong, empty if nothing did."""
        self.say(f"{kind} {host.name}")
        self.faults[kind](host)
        mended, asked, rank = time.time(), float("-inf"), self.hosts.index(host)
        while not self.has_ended and not self.is_with_the_others(rank, mended):
            waited = time.time() - mended
            if waited > _PATIENCE:
                return f"{host.name} does not train with all others {_PATIENCE:.0f} s after {kind}"
            if waited > _STAYS_OUT.get(kind, _BY_ITSELF) and waited - asked > 20.0:
                asked = waited
                added = self.muster.run("runs", "ask", self.run_id, "add", host.name)
                self.say(f"add {host.name}: {(added.stderr or added.stdout).strip()[-160:]}")
            time.sleep(0.2)
        outcome = "the run has ended" if self.has_ended else f"{host.name} is back"
        self.say(f"{outcome} after {time.time() - mended:.1f} s")
        return ""

    def rage(self, seconds: float, kinds: Sequence[str]) -> Iterator[str]:
        """Let faults pass until the time is over or the run is; yield what went wrong."""
        self.muster.until_step(self.run_id, 10, members=len(self.hosts))  # before that, faults end a run
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.has_ended and self.newest < 0.95 * self.steps:
            time.sleep(self.dice.uniform(0.5, 3))
            if problem := self.befall(self.dice.choice(kinds or list(self.faults)), self.dice.choice(self.hosts)):
                yield problem
                return

    # ----------------------------------------------------------------------------------------------- what is left

    def loss(self) -> float:
        """Return the loss at the end of the completed run."""
        losses = [event.loss for event in self.events if isinstance(event, EvaluationEvent)]
        return losses[-1] if losses and losses[-1] is not None else float("nan")

    def problems(self, usual_loss: float) -> Iterator[str]:
        """Yield what does not hold at the end."""
        if (status := self.muster.metadata(self.run_id)["status"]) != "completed":
            yield f"the run is {status}: {self.muster.metadata(self.run_id).get('error_message')}"
        elif not abs(self.loss() - usual_loss) <= _TOLERANCE * usual_loss:
            yield f"validation loss {self.loss():.4f} instead of {usual_loss:.4f}"
        yield from self._in_events()
        yield from self._in_weights()
        if self.strategy == "allreduce":
            yield from miscounted(self.counted_samples())
        begun = time.monotonic()
        while (left := self._left()) and time.monotonic() < begun + _LEASE:
            time.sleep(0.1)
        self.say(f"nothing was left after {time.monotonic() - begun:.1f} s" if not left else "something is left")
        yield from (f"left after {_LEASE:.0f} s: {line}" for line in left)

    def _left(self) -> list[str]:
        here = [f"here: {line_of(process.pid)}" for process in processes_of(self.run_id)]
        return here + [f"{host.name}: {line_of(pid)}" for host in self.hosts for pid in ours(host)]

    def _in_events(self) -> Iterator[str]:
        taken = set[int]()
        for rank, host in enumerate(self.hosts):
            steps = [e.step for e in self.events if isinstance(e, StepEvent) and e.member == rank]
            taken.update(steps)
            if wrong := [b for a, b in itertools.pairwise(steps) if b <= a]:
                yield f"{host.name} has steps twice, or out of order: {wrong[:9]}"
            states = [state for e in self.events if (state := _state_in(e, rank, host.name))]
            if ("lost", "lost") in itertools.pairwise(states):
                yield f"a loss of {host.name} is told twice: {states}"
        if missing := set(range(1, max(taken, default=0) + 1)) - taken:
            yield f"nobody has steps {sorted(missing)[:9]}"

    def _in_weights(self) -> Iterator[str]:
        hashes: dict[int, set[str]] = {}
        for event in self.events:
            if isinstance(event, SyncEvent) and event.weight_hash:
                hashes.setdefault(event.step, set()).add(event.weight_hash)
        if differing := [step for step, values in hashes.items() if len(values) > 1]:
            yield f"weights differ after steps {differing[:9]}"
        self.say(f"weights were compared after {len(hashes)} steps")

    def counted_samples(self) -> list[list[int]]:
        """Return the samples of each step of the run that count, by their ids."""
        results: dict[int, set[int]] = {}
        for event in self.events:
            if isinstance(event, SyncEvent):
                results.setdefault(event.step, set()).update(event.members)
        counted: list[list[int]] = [[] for _ in range(self.newest)]
        for rank, host in enumerate(self.hosts):
            logs = sorted((host.files / "ids").glob("*.jsonl"), key=lambda path: float(path.stem))
            begins = [float(path.stem) for path in logs]
            steps = [e for e in self.events if isinstance(e, StepEvent) and e.member == rank]
            for path, begin, end in zip(logs, begins, [*begins[1:], float("inf")], strict=True):
                calls = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]]")]
                last = 0
                for step in (e for e in steps if begin <= e.time < end):
                    done = [numbers for when, numbers in calls if when <= step.time]
                    calls, samples = calls[len(done) :], list[int]()
                    while done and len(samples) < step.samples:
                        samples += done.pop()
                    if last and step.step > last + 1 and rank in results.get(last + 1, ()):
                        counted[last] += itertools.chain(*done)  # it was out of the group before it could tell
                    if rank in results.get(step.step, {rank}):  # else the others made the result without it
                        counted[step.step - 1] += samples
                    last = step.step
                if last and rank in results.get(last + 1, ()):  # it ended before it could tell of this step
                    counted[last] += (number for _, numbers in calls for number in numbers)
        return counted


def _state_in(event: Event, rank: int, name: str) -> str:
    """Return what an event says of a member; ``added``: a worker is started for it again, and may be lost before it has
    joined."""
    if isinstance(event, RequestEvent) and (event.action, event.machine, event.outcome) == ("add", name, "accepted"):
        return "added"
    return event.status if isinstance(event, MemberEvent) and event.member == rank else ""


def miscounted(steps: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield where a sample counts twice, or not at all, in a pass over the data."""
    seen, passes = Counter[int](), 0
    for number, samples in enumerate(steps, start=1):
        seen.update(samples)
        if twice := [sample for sample, times in seen.items() if times > 1]:
            lacking = SAMPLES - len(seen)
            yield f"step {number}: samples {sorted(twice)[:9]} count twice in pass {passes + 1}, {lacking} did not yet"
            return
        if len(seen) == SAMPLES:
            passes += 1
            seen.clear()
    print(f"each of {SAMPLES} samples counts once in each of {passes} passes", flush=True)


_CORES = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--strategy", default="allreduce")
    options = parser.parse_args()
    lab = Lab(*(HostSpec(name, cores=_CORES) for name in "abcdefgh"[: options.hosts]))
    steps = int(options.seconds * _STEPS_A_SECOND)
    try:
        with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
            usual = Chaos(lab, Path(there), options.strategy, steps, random.Random())
            usual.start(pause=0.0)
            usual.muster.wait_for_end(usual.run_id)
            usual.say(f"without faults: {usual.loss():.4f}")
            for host in lab:
                for path in (host.files / "ids").glob("*.jsonl"):
                    path.unlink()
            chaos = Chaos(lab, Path(here), options.strategy, steps, random.Random(options.seed))
            chaos.start()
            try:
                problems = [*chaos.rage(options.seconds, options.faults)]
                if not problems:
                    chaos.muster.wait_for_end(chaos.run_id)
                    problems = [*chaos.problems(usual.loss())]
            finally:
                if not chaos.has_ended:
                    chaos.muster.run("stop", "--kill", chaos.run_id)
                chaos.muster.leave_nothing()
    finally:
        lab.close()
    print(*(problems or ["everything holds"]), sep="\n", flush=True)
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
