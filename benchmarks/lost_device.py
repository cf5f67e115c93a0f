"""A device of the only member is lost: after how long its loss is named, and the others train again.

    .venv/bin/python benchmarks/lost_device.py [forward backward optimizer snapshot cable]

A model of six blocks on three lab hosts, in a run for each way to be lost: the worker of the middle host is killed in
its forward, in its backward, in the optimizer's step, while it writes a snapshot, or the host's cable is pulled. The
other two go on by themselves from the newest snapshot. Times are from the loss to the first error that names the
device, and to the end of the next step. Losses are compared with those of one process. Prints a Markdown table. Needs
root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests.distributed.muster_runs import Muster
from tests.lab.lab import Lab
from tests.waiting import until
from training.records.events import ErrorEvent, StepEvent, WarningEvent

STEPS, SNAPSHOT, LOST_IN = 40, 4, 6
_PATIENCE = 180.0
JOB = """
import itertools
import os
import signal
import time
from pathlib import Path
import torch
from torch import nn
from training.snapshots.snapshot_store import SnapshotStore
from training.tasks.custom import CustomJob

ARMED, LOST = Path({armed!r}), Path({lost!r})
calls, middle = itertools.count(), []

def may_die(phase):
    if middle and middle[-1] >= {lost_in} and ARMED.exists() and ARMED.read_text() == phase:
        ARMED.unlink()
        LOST.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.layers = number, nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh())

    def forward(self, hidden):
        output = self.layers(hidden)
        if self.number == 2 and output.requires_grad:
            time.sleep(0.02)
            middle.append(next(calls) // 6 + 1)
            may_die("forward")
            output.register_hook(lambda gradient: may_die("backward"))
        return output

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 32), nn.Linear(32, 1)
        self.pieces = nn.ModuleList(map(Block, range(6)))

    def forward(self, inputs):
        hidden = self.enter(inputs)
        for block in self.pieces:
            hidden = block(hidden)
        return self.leave(hidden)

class DyingAdamW(torch.optim.AdamW):
    def step(self, *arguments, **options):
        may_die("optimizer")
        return super().step(*arguments, **options)

publish = SnapshotStore._publish

def dying_publish(self, *arguments, **options):
    may_die("snapshot")  # it is written, and not yet in place
    return publish(self, *arguments, **options)

SnapshotStore._publish = dying_publish

def build():
    torch.manual_seed(3)
    inputs = torch.randn(96, 16, 4)
    pairs = list(zip(inputs, inputs.sum(2, keepdim=True).sin(), strict=True))
    return CustomJob(Deep(), pairs, pairs[:12], nn.functional.mse_loss, optimizer=DyingAdamW)
"""


class LosesADevice(Muster):
    """Trains the model on the hosts of a lab."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab.hosts_file)
        self.armed, self.lost = lab.folder / "armed", lab.folder / "lost"
        self.job.write_text(JOB.format(armed=str(self.armed), lost=str(self.lost), lost_in=LOST_IN))
        self.options = ("--max-steps", str(STEPS), "--batch-size", "12", "--max-grad-norm", "0.5", "--eval-interval",
                        "0", "--snapshot-interval", str(SNAPSHOT))  # fmt: skip

    def whole(self) -> dict[int, float]:
        """Return the losses of one process by step."""
        words = self.train(*self.options)
        words[2:4] = ["--local", "1"]
        self.run(*words).check_returncode()
        (folder,) = (self.folder / "output").iterdir()
        return dict(self.losses(folder.name[:20]))

    def lose(self, how: str, lab: Lab) -> tuple[str, float]:
        """Let a run lose its middle device; return its id, and when it was lost."""
        self.lost.unlink(missing_ok=True)
        if how != "cable":
            self.armed.write_text(how)
            self.armed.chmod(0o666)
        run_id = self.detach(*self.options, "--layout", "pipeline")
        if how == "cable":
            self.until_step(run_id, LOST_IN)
            lab["b"].cut()
            return run_id, time.time()
        until(self.lost.exists, _PATIENCE)
        time.sleep(0.1)
        return run_id, float(self.lost.read_text())


def compare(how: str, muster: LosesADevice, lab: Lab, expected: dict[int, float]) -> str:
    """Return the line of one way to be lost."""
    run_id, lost = muster.lose(how, lab)

    def again() -> list[StepEvent]:
        repeats = any("goes on with" in e.message for e in muster.events(run_id) if isinstance(e, WarningEvent))
        later = [e for e in muster.events(run_id) if isinstance(e, StepEvent) and e.time > lost + 0.5]
        return later if repeats else []

    until(lambda: bool(again()), _PATIENCE)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    named = [e for e in muster.events(run_id) if isinstance(e, ErrorEvent) and "b-stage-2" in e.message]
    (warned, *_) = [e for e in muster.events(run_id) if isinstance(e, WarningEvent) and "goes on with" in e.message]
    step = next(event for event in muster.events(run_id) if isinstance(event, StepEvent) and event.time > warned.time)
    if how == "cable":
        lab["b"].mend()
    difference = max(abs(loss / expected[step] - 1) for step, loss in muster.losses(run_id))
    times = f"{named[0].time - lost:.2f} s | {step.time - lost:.1f} s" if named else "not named | -"
    return f"| {how} | {times} | {step.step} | {difference:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = ["forward", "backward", "optimizer", "snapshot", "cable"]
    parser.add_argument("ways", nargs="*", default=ways, help="default: all")
    arguments = parser.parse_args()
    print("| lost in | named after | next step ends after | that step | largest relative difference of losses |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place, Lab("a", "b", "c") as lab:
        muster = LosesADevice(Path(place), lab)
        try:
            expected = muster.whole()
            for how in arguments.ways:
                print(compare(how, muster, lab, expected), flush=True)
        finally:
            muster.leave_nothing()


if __name__ == "__main__":
    main()
