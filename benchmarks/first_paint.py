"""How long until the set-up's first screen stands in a terminal, and until ``--help`` has answered.

    .venv/bin/python benchmarks/first_paint.py [--turns 5]

Half a minute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil

from tests.screens.terminal import Terminal

WIZARD = str(ROOT / "wizard.py")
FIRST = "What do you want to do?"


def painted(*arguments: str) -> tuple[float, float]:
    """Return wall and processor seconds from the start to the first screen with its rows."""
    with Terminal(sys.executable, WIZARD, *arguments) as terminal:
        terminal.until(FIRST)
        seconds = terminal.until("New set-up")
        times = psutil.Process(terminal.process.pid).cpu_times()
        terminal.press("\x03")
        terminal.end()
    return seconds, times.user + times.system


def helped() -> tuple[float, float]:
    """Return wall and processor seconds of ``--help``."""
    began, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, WIZARD, "--help"], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return time.monotonic() - began, used


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    kinds = {
        "wizard.py": lambda: painted(),
        "wizard.py --demo 3": lambda: painted("--demo", "3"),
        "wizard.py --help": helped,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, measure in kinds.items():
            found[name].append(measure())
    print(f"{'':20} wall s: median (all){'':18} processor s: median   load {os.getloadavg()[0]:.1f}")
    for name, figures in found.items():
        walls, used = zip(*figures)
        every = " ".join(f"{wall:.2f}" for wall in sorted(walls))
        print(f"{name:20} {statistics.median(walls):.2f} ({every}){'':4} {statistics.median(used):.2f}")


if __name__ == "__main__":
    main()
