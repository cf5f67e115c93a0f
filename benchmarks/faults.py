"""What a fault costs a run on lab hosts: how long the others stand still, and whether a step is lost.

    python benchmarks/faults.py [--times 10] [--members 3] [--strategy allreduce] [FAULT ...]

Needs root on Linux. A small model, 50 ms of waiting a step, over network namespaces with real SSH servers. For each
fault a process is killed with SIGKILL, ``--times`` times: ``coordinator`` and ``supervisor`` in one run, ``worker`` in
a run each. In a run each, too, ``starter`` kills supervisor and coordinator on the machine that started the run, which
takes it up again once the members have elected another coordinator. The pause is the longest time between the ends of
two steps of a member that is not killed, from the kill to a second after the run has told of it, less the median step
before.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed.run.returning import take_up
from tests.distributed.muster_runs import Muster
from tests.lab.lab import Lab
from tests.lab.processes import line_of, signal_all
from tests.lab.spec import HostSpec
from tests.waiting import until
from training.records.events import ElectionEvent, MemberEvent, StepEvent, WarningEvent
from training.run.processes import processes_of

_STEP = 0.05
_SETTLED = 20
"""Steps after the event of a kill that belong to it."""
_BEFORE = 60
"""Steps before a kill: a coordinator that ends five times within two seconds of its start is not started again."""
_TOLD = {
    "coordinator": "is started again",
    "supervisor": "another one has taken its place",
    "starter": "carries the coordinator",
}
"""Part of the warning, or of the election, that tells of a fault."""
_MANY = 100_000
_MODEL = "nn.Linear(2, 2)"


class Trial:
    """One run on lab hosts that trains until it is ended.

    Args:
        options: further words of the command.
        model: what is trained.
    """

    def __init__(self, lab: Lab, folder: Path, strategy: str, options: Sequence[str] = (), model: str = _MODEL) -> None:
        self.lab, self.members = lab, len(list(lab))
        self.muster = Muster(folder, lab.hosts_file, _STEP, model=model)
        words = ["--max-steps", str(_MANY), "--strategy", strategy, "--no-eval-before", *options]
        self.run_id = self.muster.detach(*words)
        self.reach(_SETTLED)

    def newest(self) -> int:
        return max((event.step for event in self.steps()), default=0)

    def steps(self, member: int | None = None) -> list[StepEvent]:
        events = self.muster.events(self.run_id)
        return [e for e in events if isinstance(e, StepEvent) and member in (None, e.member)]

    def reach(self, step: int, members: range | None = None) -> None:
        for member in members or range(self.members):
            until(lambda: any(event.step >= step for event in self.steps(member)), 120.0)  # noqa: B023 - at once

    def told(self, fault: str) -> int:
        events = self.muster.events(self.run_id)
        if fault == "worker":
            return sum(isinstance(event, MemberEvent) and event.status == "lost" for event in events)
        return sum(isinstance(e, WarningEvent | ElectionEvent) and _TOLD[fault] in e.message for e in events)

    def pause(self, fault: str, survivors: range) -> float:
        """Kill a process; return the pause of the survivors in seconds."""
        self.reach(self.newest() + _BEFORE, survivors)
        begun, told = time.time(), self.told(fault)
        getattr(self, f"kill_{fault}")()
        until(lambda: self.told(fault) > told)
        end = time.time() + _SETTLED * _STEP
        for member in survivors:
            until(lambda: self.steps(member)[-1].time > end)  # noqa: B023 - at once
        pauses = []
        for member in survivors:
            times = [event.time for event in self.steps(member)]
            usual = statistics.median(b - a for a, b in itertools.pairwise(times) if b < begun)
            pauses.append(max(b - a for a, b in itertools.pairwise(times) if b >= begun) - usual)
        return max(pauses)

    def check(self, survivors: range) -> int:
        """Return how many steps members lack that others took without them, while they were out of the group.

        Raises:
            SystemExit: nobody has a step, or a member has one twice.
        """
        steps = {member: [event.step for event in self.steps(member)] for member in survivors}
        taken = set().union(*steps.values())
        if missing := set(range(1, max(taken) + 1)) - taken:
            raise SystemExit(f"nobody has steps {sorted(missing)}")
        for member, numbers in steps.items():
            if len(numbers) > len(set(numbers)):
                raise SystemExit(f"member {member}: steps are doubled")
        return sum(numbers[-1] - len(numbers) for numbers in steps.values())

    def end(self) -> None:
        try:
            self.muster.run("stop", "--kill", self.run_id)
        finally:
            self.muster.leave_nothing()

    # ------------------------------------------------------------------------------------------ what is killed

    def kill_starter(self) -> None:
        self.muster.kill_supervision(self.run_id)
        self.kill_coordinator()
        elected = f".cache/muster/runs/{self.run_id}/*/secrets/coordinator.json"  # written as it is started
        until(lambda: any(any(host.files.glob(elected)) for host in self.lab))
        take_up(self.muster.folder_of(self.run_id))

    def kill_worker(self) -> None:
        host = list(self.lab)[-1]
        signal_all(host.pids("training.workers.worker"), signal.SIGKILL)

    def kill_coordinator(self) -> None:
        for process in until(self._coordinators):  # one that was killed before may not have started again
            process.kill()

    def _coordinators(self) -> list[psutil.Process]:
        mine = processes_of(self.run_id)
        return [process for process in mine if "training.exchange.group.coordinator_main" in line_of(process.pid)]

    def kill_supervisor(self) -> None:
        killed = self.muster.supervisor(self.run_id)
        signal_all([killed], signal.SIGKILL)


def measured(lab: Lab, fault: str, times: int, strategy: str) -> tuple[list[float], int]:
    """Return the pauses of a fault in seconds, and how many steps members lack that others took."""
    members = len(list(lab))
    survivors = range(members - 1) if fault == "worker" else range(members)
    runs, kills = (1, times) if fault in ("coordinator", "supervisor") else (times, 1)
    pauses: list[float] = []
    lacking = 0
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(lab, Path(folder), strategy)
            try:
                pauses += [trial.pause(fault, survivors) for _ in range(kills)]
                lacking += trial.check(survivors)
            finally:
                trial.end()
    return pauses, lacking


def _outcome(lacking: int) -> str:
    without = f", {lacking} of them without a member that was out of the group" if lacking else ""
    return f"no step lost or doubled{without}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", default=["worker", *_TOLD])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--strategy", default="allreduce")
    options = parser.parse_args()
    lab = Lab(*(HostSpec(name) for name in "abcdefgh"[: options.members]))
    try:
        for fault in options.faults:
            pauses, lacking = measured(lab, fault, options.times, options.strategy)
            row = f"{statistics.median(pauses):.2f} s in the median, {max(pauses):.2f} s at most"
            print(f"{fault:12} killed {len(pauses)} times: a pause of {row}; {_outcome(lacking)}", flush=True)
    finally:
        lab.close()


if __name__ == "__main__":
    main()
