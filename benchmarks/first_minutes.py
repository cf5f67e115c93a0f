"""How long a new user waits: for the tour's first screen beside an empty cache, from a clone to a trained demo, and
from a hosts file of three machines to the first step.

    .venv/bin/python benchmarks/first_minutes.py tour
    .venv/bin/python benchmarks/first_minutes.py demo
    sudo .venv/bin/python benchmarks/first_minutes.py hosts

``tour`` and ``demo`` need git, ``uvx``, and the internet for the packages. ``tour``, half a minute: a wheel of this
tree is opened by ``uvx`` with a cache of its own. ``demo``, about eight minutes: ``make setup`` and ``make demo`` in a
fresh clone of the last commit, beside pip's cache. ``hosts``, some minutes: the guided set-up with three hosts of the
lab, which have this Python, driven by keys; it counts the keys and the seconds of each step until it can be left. On
Strategy the machines are measured, which copies and trains; the phases of the launch are listed by themselves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.pilot import Pilot
from textual.screen import Screen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.cli.approval import read_hosts
from app.run_view.figures import start_line
from app.run_view.run_state import state_of
from app.screens.app import WizardApp
from app.wizard.engine import Wizard
from app.wizard.services.services import Services
from app.wizard.state.actions import set_option
from app.wizard.state.dependencies import blockers
from app.wizard.state.state import Step, WizardState
from profiles.errors import counted
from tests.lab.lab import Lab
from tests.screens.pilot import run, until
from tests.screens.terminal import Terminal
from tests.waiting import until as until_value
from training.records.run_folder import RunFolder

PATIENCE = 900.0
"""Most seconds for one step of the set-up."""
CLIPS = "240"
"""Training clips: the features of all would be computed by three hosts on the cores of one machine."""
FIRST = "What do you want to do?"


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
    """Seconds of each command from a clone to a trained model."""
    clone = folder / "clone"
    cloning = seconds_of("git", "clone", "--quiet", str(ROOT), str(clone), folder=folder)
    return {"clone": cloning, **{name: seconds_of("make", name, folder=clone) for name in ("setup", "demo")}}


def hosts(folder: Path) -> dict[str, float]:
    """Seconds of each step of the set-up, from its first screen to the first step of the run on three hosts."""
    seconds, runs, keys = dict[str, float](), list[Path](), 0

    def dashboard(path: Path) -> Screen[None]:
        runs.append(path)
        return Screen()

    with Lab("a", "b", "c") as lab:
        read_hosts(lab.hosts_file, named=True, person=False)
        wizard = Wizard(Services(output=folder / "output", hosts=lab.hosts_file))
        app = WizardApp(wizard, dashboard=dashboard)
        wizard.subscribe(app.changed)
        wizard.do(set_option("max_train_samples", CLIPS))

        async def drive(pilot: Pilot[Any]) -> None:
            nonlocal keys
            while not runs:
                began, step = time.monotonic(), wizard.state.step
                await until(pilot, lambda: runs or _is_free(wizard.state), PATIENCE)
                seconds[step.value] = time.monotonic() - began
                print(f"{step.heading}: {seconds[step.value]:.1f} s after {counted(keys, 'key')}", flush=True)
                if not runs:
                    keys += 1
                    await pilot.pause(1.0)  # a screen that has just opened takes no key yet
                    await pilot.press("n" if step is not Step.PLAN else "enter")
                    await until(pilot, lambda step=step: wizard.state.step is not step, PATIENCE)

        try:
            run(app, drive)
        finally:
            wizard.close()
        launched = RunFolder.open(runs[0])
        attempt = until_value(lambda: (last := state_of(launched).attempts[-1]).trains_since and last)
        print(f"{keys} keys; stages of the start: {start_line(launched.events(), attempt)}")
        # its supervisor would wait for machines that are gone
        stop = [sys.executable, str(ROOT / "cli_typer.py"), "stop", str(runs[0]), "--kill"]
        subprocess.run(stop, cwd=ROOT, check=False)
    return seconds


def _is_free(state: WizardState) -> bool:
    """Whether the step can be left: three machines are picked, nothing is under way, and nothing is missing."""
    return len(state.picked) == 3 and not (state.busy or state.step is Step.LAUNCH or blockers(state))


def main() -> None:
    """Measure one of them, and print the seconds of its stages."""
    kinds: dict[str, Callable[[Path], dict[str, float]]] = {"tour": tour, "demo": demo, "hosts": hosts}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    kind = parser.parse_args().kind
    with tempfile.TemporaryDirectory() as folder:
        stages = kinds[kind](Path(folder))
    for name, seconds in {**stages, "together": sum(stages.values())}.items():
        print(f"{name:20} {seconds:7.1f} s")


if __name__ == "__main__":
    main()
