"""Record the run that the tour plays (app/demo/record): three simulated machines train for real, at their own clocks.

    .venv/bin/python benchmarks/record_demo.py run FOLDER     # 25 processor minutes; the published tiny.en is needed
    .venv/bin/python benchmarks/record_demo.py keep FOLDER    # writes the package's record from it

Losses, word error rates and texts are those of the training. Its times are those that the planner's cost model gives
the machines of the tour (``docs/how-to/scale.md``), so that it does not matter what else this computer does. One
machine is lost at a moment that stands below, and comes back.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.demo import RECORD
from app.demo.course import RecordedTraining
from app.demo.services import recommended
from distributed.planning.simulated import ClusterClock, Machines
from training.records.events import EvaluationEvent, Event, StepEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.run_controller import RunController
from training.simulated.clock import Absence, Cost
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, read_showcase

MACHINES = 3
MODEL = "openai/whisper-tiny.en"
VICTIM = "demo-studio"
LOST_AT, AWAY = 55.9, 9.0
"""Simulated seconds: when the victim is lost, and for how long it does not answer."""
THREADS = 2


class ScriptedClock(ClusterClock):
    """The clock of the tour's machines, of which one is lost, once."""

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        self._victim = next(member.rank for member in plan.members if member.name == VICTIM)
        first = random.Random(f"{plan.profile.training.seed}/0/{self._victim}").expovariate(1.0)
        self.absences = {self._victim: Absence(first / LOST_AT, AWAY)}

    def cost(self, members: tuple[int, ...], trainable: int, steps: int) -> Cost:
        if self._victim not in members:
            self.absences = {self._victim: Absence(0.0, AWAY)}
        return super().cost(members, trainable, steps)


def plan() -> RunPlan:
    """Return the run that the set-up recommends for the tour, as one of simulated machines."""
    planned = recommended(MACHINES)
    assert planned.figures is not None
    profile = planned.plan.profile
    training = profile.training.model_copy(update={"device": "cpu", "threads": THREADS})
    model = profile.model.model_copy(update={"model_path": MODEL, "from_scratch": False, "language": ""})
    evaluation = profile.evaluation.model_copy(update={"eval_local": "off"})  # the tour shows averaged weights only
    profile = profile.model_copy(update={"training": training, "model": model, "evaluation": evaluation})
    machines = Machines(planned.figures)
    simulated = machines.with_clock(plan_local_run(profile, MACHINES, simulated=True))
    assert simulated.clock is not None
    batches = {member.name: member.batch_size for member in planned.plan.members}
    members = tuple(one.model_copy(update={"batch_size": batches[one.name]}) for one in simulated.members)
    clock = simulated.clock.model_copy(update={"made_by": "benchmarks.record_demo:ScriptedClock"})
    return simulated.model_copy(update={"members": members, "clock": clock})


def record(folder: Path) -> None:
    """Train, and leave the run in ``folder``."""
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}

    def tell(event: Event) -> None:
        if not isinstance(event, StepEvent) or event.step % 10 == 0:
            print(str(event)[:300], flush=True)

    with RunFolder.create(folder, plan(), ["record_demo.py"]) as run:
        print(run.path, flush=True)
        training = RunController(run.plan(), run, tell)
        training.start()
        print(training.wait())


def keep(folder: Path) -> None:
    """Write the package's record from the run that was recorded."""
    (path,) = (one.parent for one in folder.glob("*/plan.json"))
    events = list(RunFolder.open(path).events())
    steps = {(one.member, one.step): one for one in events if isinstance(one, StepEvent)}
    last = max(step for _, step in steps)
    losses = [[_rounded(steps.get((rank, step)), "loss") for step in range(1, last + 1)] for rank in range(MACHINES)]
    norms = [_rounded(steps.get((0, step)), "grad_norm") for step in range(1, last + 1)]
    evaluations = [one for one in events if isinstance(one, EvaluationEvent)]
    shown = read_showcase(path / FOLDER / NAME)
    assert shown is not None, "the run has no samples"
    samples = tuple(one.model_copy(update={"sound": "", "soundless": ""}) for one in shown.samples)
    course = RecordedTraining.model_validate(
        {
            "losses": losses,
            "norms": norms,
            "evaluations": evaluations,
            "showcase": shown.model_copy(update={"samples": samples}),
        }
    )
    with gzip.GzipFile(RECORD / "course.json.gz", "wb", mtime=0) as stream:
        stream.write(course.model_dump_json(exclude_none=False).encode())
    print(f"{last} steps, {(RECORD / 'course.json.gz').stat().st_size} bytes")


def _rounded(event: StepEvent | None, name: str) -> float | None:
    value = None if event is None else getattr(event, name)
    return None if value is None else float(f"{value:.4g}")


def main() -> None:
    """Record, or keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "keep"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "run":
        record(given.folder)
    else:
        keep(given.folder)


if __name__ == "__main__":
    main()
