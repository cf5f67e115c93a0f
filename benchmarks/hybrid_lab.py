"""Two members of two lab hosts each beside two workers that each hold the whole model: losses and weights.

    .venv/bin/python benchmarks/hybrid_lab.py [diloco] [allreduce] [--mbit 100]

A Llama of two blocks with a tied embedding, cut behind the first one; six steps, ``diloco`` exchanges in every second
one. Prints a Markdown table with the largest differences. Needs root; a few minutes for each strategy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import safetensors.torch

from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.layouts.staged_records import tied_llama
from training.records.events import StepEvent
from training.records.plan import read_plan
from training.records.run_folder import RunFolder

_OPTIONS = {"max_steps": 6, "batch_size": 16, "block_size": 32, "threads": 1, "eval_interval": 3, "max_eval_samples": 4,
            "lr_scaling": "off", "from_scratch": False, "codec": "fp32", "mixed_precision": "off"}  # fmt: skip
_OF_STRATEGY = {"diloco": {"diloco.sync_interval": 2}, "allreduce": {}}


def train(folder: Path, profile: str, where: list[str], options: dict[str, Any]) -> Path:
    """Train in a folder through the real command line; return the run folder.

    Raises:
        CalledProcessError: the run failed; its error is on stderr.
    """
    before = {*(folder / "output").glob("*")}
    words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, str(ROOT / "cli_typer.py"), "train", profile, *where, *words, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        print(ended.stdout[-2000:], file=sys.stderr)
    ended.check_returncode()
    (run,) = {*(folder / "output").glob("*")} - before
    return run


def losses(run: Path) -> dict[tuple[int | None, int], float]:
    """Return the losses of a run, by member and step."""
    events = RunFolder.open(run).events()
    return {(event.member, event.step): event.loss for event in events if isinstance(event, StepEvent)}


def compare(strategy: str, mbit: float) -> str:
    """Return the line of a strategy."""
    with tempfile.TemporaryDirectory() as place, Lab(*(HostSpec(name, mbit=mbit) for name in "abcd")) as lab:
        folder = Path(place)
        options = {
            **tied_llama(folder, blocks=2, lines=2000),
            **_OPTIONS,
            **_OF_STRATEGY[strategy],
            "strategy": strategy,
        }
        staged = {**options, "layout": "pipeline", "stages": 2}
        hybrid = train(folder, "nanogpt", ["--hosts", str(lab.hosts_file)], staged)
        members = read_plan(hybrid / "plan.json").members
        assert [len(member.machines) for member in members] == [2, 2], members
        whole = train(folder, "nanogpt", ["--local", "2"], options)
        figures, expected = losses(hybrid), losses(whole)
        assert figures.keys() == expected.keys() and len(figures) == 12, (figures, expected)
        by_loss = max(abs(figures[key] - loss) / loss for key, loss in expected.items())
        weights, wanted = (safetensors.torch.load_file(run / "model" / "model.safetensors") for run in (hybrid, whole))
        assert weights.keys() == wanted.keys()
        by_weight = max(float((weights[name] - weight).abs().max()) for name, weight in wanted.items())
        names = ", ".join("+".join(member.machines) for member in members)
        return f"| {strategy} | {names} | {by_loss:.1e} | {by_weight:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", default=list(_OF_STRATEGY), help="default: both")
    parser.add_argument("--mbit", type=float, default=100.0)
    arguments = parser.parse_args()
    print("| between members | members | losses, largest relative difference | weights, largest difference |")
    print("|---|---|---|---|")
    for strategy in arguments.strategies:
        print(compare(strategy, arguments.mbit), flush=True)


if __name__ == "__main__":
    main()
