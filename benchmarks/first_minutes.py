"""How long a new user waits: for the tour's first screen beside an empty cache, and from a clone to a trained demo.

    .venv/bin/python benchmarks/first_minutes.py tour
    .venv/bin/python benchmarks/first_minutes.py demo

Needs git, ``uvx``, and the internet for the packages. ``tour``, half a minute: a wheel of this tree is opened by
``uvx`` with a cache of its own. ``demo``, about eight minutes: ``make setup`` and ``make demo`` in a fresh clone of the
last commit, beside pip's cache. Three machines are not measured here.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.screens.terminal import Terminal

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


def main() -> None:
    """Measure one of them, and print the seconds of its stages."""
    kinds: dict[str, Callable[[Path], dict[str, float]]] = {"tour": tour, "demo": demo}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    kind = parser.parse_args().kind
    with tempfile.TemporaryDirectory() as folder:
        stages = kinds[kind](Path(folder))
    for name, seconds in {**stages, "together": sum(stages.values())}.items():
        print(f"{name:20} {seconds:7.1f} s")


if __name__ == "__main__":
    main()
