"""What shares that follow the measured speed are worth on machines of unequal speed, or one that is slowed in mid-run.

    python benchmarks/unequal_speed.py [--strategy allreduce diloco] [--balance auto off] [--steps 200] [--quotas]
        [CASE ...]

Needs root on Linux. Three lab hosts with real SSH servers; compute is emulated: a sample takes a fixed time, divided by
the speed of its host. ``unequal``: speeds of 1, 0.5 and 0.25 from the start, and a strategy named by hand. ``slowed``:
equal hosts, of which one falls to a quarter in mid-run. The rate is that of all samples to the sum of the members'
speeds, each as measured without waiting: over all steps, or those after the host was slowed, and from the last change
of shares on.

With ``--quotas`` samples take processor time instead, and the speed of a host is its quota of a core (0.4 times its
speed), which its exchanges share. It is given that when all have begun, as imports would take minutes within it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.distributed.muster_runs import Muster
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from training.records.events import StepEvent, WarningEvent

_SAMPLE = 0.01
"""Seconds of a sample on a host of speed 1."""
_CORE = 0.4
"""Cores of a host of speed 1, with quotas; there a sample takes so much of its processor time as would last as long."""
_BEGUN, _SLOWED_AT = 5, 60
_SPEED = "speed"
"""File in the home folder of each host that holds its speed."""
JOB = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training.tasks.custom import CustomJob

def build():
    dice = torch.Generator().manual_seed(1)
    points = torch.rand(24000, 2, generator=dice)
    return CustomJob(nn.Linear(2, 2), TensorDataset(points, (points.sum(dim=1) > 1).long()), None, loss)

def loss(scores, wanted):
    if {core}:
        end = time.thread_time() + len(wanted) * {sample} * {core}
        while time.thread_time() < end:
            pass
    else:
        time.sleep(len(wanted) * {sample} / float((Path.home() / {speed!r}).read_text()))
    return nn.functional.cross_entropy(scores, wanted)
"""


def set_speeds(lab: Lab, *speeds: float) -> None:
    for host, speed in zip(lab, speeds, strict=True):
        if host.spec.cores is not None:
            host.set_cores(_CORE * speed)
            continue
        written = host.files / f"{_SPEED}.new"
        written.write_text(str(speed))
        written.replace(host.files / _SPEED)


def step_ends(muster: Muster, run_id: str) -> dict[int, tuple[float, int]]:
    """Return when the last member ended each step, and the samples of all in it."""
    ends: dict[int, tuple[float, int]] = {}
    for event in muster.events(run_id):
        if isinstance(event, StepEvent):
            end, samples = ends.get(event.step, (0.0, 0))
            ends[event.step] = max(end, event.time), samples + event.samples
    return ends


def possible_rate(muster: Muster, run_id: str, begin: int) -> float:
    """Return the samples per second that the members compute together if none waits, from a step on."""
    seconds: dict[int, list[float]] = {}
    for event in muster.events(run_id):
        if isinstance(event, StepEvent) and event.step > begin and event.samples:
            seconds.setdefault(event.member or 0, []).append(event.compute / event.samples)
    return sum(1 / statistics.median(values) for values in seconds.values())


def rate(ends: dict[int, tuple[float, int]], begin: int, end: int) -> float:
    """Return samples per second from the end of one step to that of another."""
    return sum(ends[step][1] for step in range(begin + 1, end + 1)) / (ends[end][0] - ends[begin][0])


def measure(lab: Lab, case: str, strategy: str, balance: str, steps: int) -> str:
    """Carry out a run; return its row."""
    before = (1.0, 0.5, 0.25) if case == "unequal" else (1.0, 1.0, 1.0)
    after = before if case == "unequal" else (1.0, 1.0, 0.25)
    core = 0.0 if next(iter(lab)).spec.cores is None else _CORE
    set_speeds(lab, *((1 / _CORE,) * 3 if core else before))
    with tempfile.TemporaryDirectory() as folder:
        muster = Muster(Path(folder), lab.hosts_file)
        muster.job.write_text(JOB.format(sample=_SAMPLE, speed=_SPEED, core=core))
        words = ["--max-steps", str(steps), "--strategy", strategy, "--no-eval-before", "--set", f"balance={balance}"]
        words += ["--sync-interval", "10"] if strategy == "diloco" else []
        run_id = muster.detach(*words)
        try:
            begin = 1
            if core:
                muster.until_step(run_id, _BEGUN)
                set_speeds(lab, *before)
                begin = max(step_ends(muster, run_id))
            if case == "slowed":
                muster.until_step(run_id, _SLOWED_AT)
                set_speeds(lab, *after)
                begin = max(step_ends(muster, run_id))
            ended = muster.wait_for_end(run_id)
            if ended.returncode:
                raise SystemExit(ended.stderr)
            events, ends = muster.events(run_id), step_ends(muster, run_id)
            possible = possible_rate(muster, run_id, begin)
        finally:
            muster.leave_nothing()
    told = [event for event in events if isinstance(event, WarningEvent) and " share " in event.message]
    changes = [event.step or 0 for event in told]
    answered = next((step - begin for step in changes if step > begin), None)
    row = [case, strategy, balance, f"{rate(ends, begin, steps) / possible:.2f}"]
    row += [f"{rate(ends, changes[-1] if changes else begin, steps) / possible:.2f}", str(answered or "never")]
    row += [f"{os.getloadavg()[0]:.1f}", "; ".join(f"step {event.step}: {event.message}" for event in told)]
    return f"| {' | '.join(row)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["unequal", "slowed"])
    parser.add_argument("--strategy", nargs="+", default=["allreduce", "diloco"])
    parser.add_argument("--balance", nargs="+", default=["auto", "off"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quotas", action="store_true")
    options = parser.parse_args()
    print("| case | strategy | balance | all steps | from the last change | answered after steps | load | told |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    lab = Lab(*(HostSpec(name, cores=1.0 if options.quotas else None) for name in ("attic", "cellar", "garage")))
    try:
        for case in options.cases:
            for strategy in options.strategy:
                for balance in options.balance:
                    print(measure(lab, case, strategy, balance, options.steps), flush=True)
    finally:
        lab.close()


if __name__ == "__main__":
    main()
