"""How long a new user waits: for the tour's first screen beside an empty cache, from a clone to a trained demo, and
from a hosts file of up to three machines to the first step.

    .venv/bin/python benchmarks/first_minutes.py tour
    .venv/bin/python benchmarks/first_minutes.py demo
    sudo .venv/bin/python benchmarks/first_minutes.py hosts [--machines 3]

``tour`` and ``demo`` need git, ``uvx``, and the internet for the packages. ``tour``, half a minute: a wheel of this
tree is opened by ``uvx`` with a cache of its own. ``demo``, about five minutes: ``make demo`` in a fresh clone of the
last commit, beside pip's cache. ``hosts``, some minutes: the guided set-up with hosts of the lab,
which have this Python and share the cores of this machine, driven by keys; it counts the keys and the seconds of each
step until it can be left. Strategy and Launch are divided by what the machine was doing that everybody waited for, as
it reported it: copying, training, evaluating, or what is none of these.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from textual.pilot import Pilot
from textual.screen import Screen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.cli.approval import read_hosts
from app.run_view.run_state import state_of
from app.screens.app import WizardApp
from app.wizard.engine import Wizard
from app.wizard.services.services import Services
from app.wizard.state.actions import set_option
from app.wizard.state.dependencies import blockers
from app.wizard.state.state import Step, WizardState
from distributed.measuring.machine_figures import MeasuringProgress
from profiles.errors import counted
from tests.lab.lab import Lab
from tests.screens.pilot import run, until
from tests.screens.terminal import Terminal
from tests.waiting import until as until_value
from training.records.events import EvaluationEvent, Event, StepEvent, TimingEvent
from training.records.run_folder import RunFolder

PATIENCE = 900.0
"""Most seconds for one step of the set-up."""
CLIPS = "240"
"""Training clips: the features of all would be computed by three hosts on the cores of one machine."""
FIRST = "What do you want to do?"
COPYING, TRAINING, EVALUATING = "copying", "training", "evaluating"
MEASURING = {
    "receiving": COPYING,
    "starting": "starting programs",
    "reading": "preparing recordings",
    "preparing": "preparing recordings",
    "measuring steps": TRAINING,
    "measuring an evaluation": EVALUATING,
}
"""Kind of each phase of a machine that is measured, by how its report begins."""
STARTING = {
    "command: plan": "checking machines",
    "supervisor: hashes": "starting programs",
    "machine: code and data": COPYING,
    "worker: imports": "starting programs",
    "worker: data": "preparing recordings",
    "worker: joins, builds the model": "joining, building the model",
}
"""Kind of each phase of a start, by the timing event at its end."""
Phase = tuple[str, float]
"""Kind and seconds."""


def seconds_of(*command: str, folder: Path) -> float:
    """Run a command, whose output is shown, and return how long it took."""
    began = time.monotonic()
    subprocess.run(command, cwd=folder, check=True)
    return time.monotonic() - began


def tour(folder: Path) -> dict[str, float]:
    """Seconds to build the wheel, and from ``uvx`` with an empty cache to the tour's first screen."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    building = seconds_of(*pip, "--wheel-dir", str(folder), str(ROOT), folder=folder)
    (wheel,) = folder.glob("*.whl")
    os.environ.update(UV_CACHE_DIR=str(folder / "cache"), HOME=str(folder))
    with Terminal("uvx", "--from", str(wheel), "muster", "tour") as terminal:
        first = terminal.until(FIRST)
        terminal.press("\x03")
        terminal.end()
    megabytes = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file()) / 1e6
    print(f"{megabytes:.0f} MB in the cache that was empty")
    return {"wheel": building, "tour's first screen": first}


def demo(folder: Path) -> dict[str, float]:
    """Seconds of each stage from a clone to a trained model: ``make demo`` installs, then trains."""
    clone = folder / "clone"
    cloning = seconds_of("git", "clone", "--quiet", str(ROOT), str(clone), folder=folder)
    began = time.time()
    whole = seconds_of("make", "demo", folder=clone)
    (run_folder,) = (clone / "output").glob("*-demo")
    installing = next(iter(RunFolder.open(run_folder).events())).time - began
    return {"clone": cloning, "packages, first import": installing, "run": whole - installing}


class MeasuringClock:
    """The reports of machines that are measured, with the time of each."""

    def __init__(self, wizard: Wizard) -> None:
        self._wizard, self._read = wizard, 0
        self.reports: list[tuple[float, MeasuringProgress]] = []
        wizard.subscribe(self._look)

    def _look(self) -> None:
        state = self._wizard.state
        new = state.log[len(state.log) - (state.logged - self._read) :] if state.logged > self._read else ()
        self._read = state.logged
        self.reports += [(time.monotonic(), line) for line in new if isinstance(line, MeasuringProgress)]

    def phases(self, begin: float, end: float) -> Iterator[Phase]:
        """Yield the phases of the machine that was measured last, between two times."""
        last = self.reports[-1][1].machine
        kind, since = "connecting, sending code", begin
        for at, report in self.reports:
            if report.machine == last:
                yield kind, at - since
                begun = (of for word, of in MEASURING.items() if report.work.startswith(word))
                kind, since = next(begun, "making the plan"), at
        yield kind, end - since


def phases_of_start(events: Sequence[Event], begin: float) -> Iterator[Phase]:
    """Yield the phases of a start until the first step of the member that took it last; times are Unix times."""
    last = max((event for event in events if isinstance(event, StepEvent) and event.step == 1), key=_time_of)
    since = begin
    for part, kind in STARTING.items():
        ends = [
            e.time for e in events if isinstance(e, TimingEvent) and e.part == part and e.member in (None, last.member)
        ]
        if ends and max(ends) > since:
            yield kind, max(ends) - since
            since = max(ends)
    evaluated = [event.time for event in events if isinstance(event, EvaluationEvent) and event.step == 0]
    if evaluated:
        yield EVALUATING, max(evaluated) - since
        since = max(evaluated)
    yield TRAINING, last.time - since


def _time_of(event: Event) -> float:
    return event.time


def summed(phases: Iterator[Phase]) -> dict[str, float]:
    """Return the seconds of each kind."""
    seconds = defaultdict[str, float](float)
    for kind, of_phase in phases:
        seconds[kind] += of_phase
    return dict(seconds)


def hosts(folder: Path, machines: int = 3) -> dict[str, float]:
    """Seconds of each step of the set-up, from its first screen to the first step of the run on the hosts."""
    seconds, parts, runs, keys = dict[str, float](), dict[str, dict[str, float]](), list[Path](), 0
    with Lab(*"abc"[:machines]) as lab:
        read_hosts(lab.hosts_file, named=True, person=False)
        wizard = Wizard(Services(output=folder / "output", hosts=lab.hosts_file))

        def dashboard(path: Path) -> Screen[None]:
            runs.append(path)
            return Screen()

        app = WizardApp(wizard, dashboard=dashboard)
        wizard.subscribe(app.changed)
        wizard.do(set_option("max_train_samples", CLIPS))
        measuring, launched_at = MeasuringClock(wizard), 0.0

        async def drive(pilot: Pilot[Any]) -> None:
            nonlocal keys, launched_at
            while not runs:
                began, step = time.monotonic(), wizard.state.step
                await until(pilot, lambda: runs or _is_free(wizard.state, machines), PATIENCE)
                seconds[step.value] = time.monotonic() - began
                print(f"{step.heading}: {seconds[step.value]:.1f} s after {counted(keys, 'key')}", flush=True)
                if step in (Step.STRATEGY, Step.PLAN) and measuring.reports and not parts:
                    parts[step.value] = summed(measuring.phases(began, time.monotonic()))
                if not runs:
                    keys += 1
                    await pilot.pause(1.0)  # a screen that has just opened takes no key yet
                    launched_at = time.time()
                    await pilot.press("n" if step is not Step.PLAN else "enter")
                    await until(pilot, lambda step=step: wizard.state.step is not step, PATIENCE)

        try:
            run(app, drive)
        finally:
            wizard.close()
        launched = RunFolder.open(runs[0])
        until_value(lambda: state_of(launched).attempts[-1].trains_since)
        parts[Step.LAUNCH.value] = summed(phases_of_start([*launched.events()], launched_at))
        # its supervisor would wait for machines that are gone
        stop = [sys.executable, str(ROOT / "cli_typer.py"), "stop", str(runs[0]), "--kill"]
        subprocess.run(stop, cwd=ROOT, check=False)
    _print_parts(parts, sum(seconds.values()))
    return seconds


def _print_parts(parts: dict[str, dict[str, float]], together: float) -> None:
    for step, kinds in parts.items():
        print(f"{step}: {', '.join(f'{kind} {seconds:.1f}' for kind, seconds in kinds.items())}")
    useful, evaluating = (
        sum(kinds.get(kind, 0.0) for kinds in parts.values() for kind in wanted)
        for wanted in ((COPYING, TRAINING), (EVALUATING,))
    )
    neither = together - useful - evaluating
    print(f"training or copying {useful:.1f} s, evaluating {evaluating:.1f} s, neither {neither:.1f} s")


def _is_free(state: WizardState, machines: int) -> bool:
    """Whether the step can be left: the machines are picked, nothing is under way, and nothing is missing."""
    return len(state.picked) == machines and not (state.busy or state.step is Step.LAUNCH or blockers(state))


def main() -> None:
    """Measure one of them, and print the seconds of its stages."""
    kinds: dict[str, Callable[..., dict[str, float]]] = {"tour": tour, "demo": demo, "hosts": hosts}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--machines", type=int, choices=(1, 2, 3), default=3, help="hosts of the lab")
    options = parser.parse_args()
    measured = functools.partial(hosts, machines=options.machines) if options.kind == "hosts" else kinds[options.kind]
    with tempfile.TemporaryDirectory() as folder:
        stages = measured(Path(folder))
    for name, seconds in {**stages, "together": sum(stages.values())}.items():
        print(f"{name:20} {seconds:7.1f} s")


if __name__ == "__main__":
    main()
