"""Two workers on two cores against one worker on one core: samples/s of the demo task.

    .venv/bin/python benchmarks/two_workers.py [--steps 120] [--pairs 3]

The single worker is held to one core by ``taskset``; the pair, its coordinator included, to two. The runs take turns.
About five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from local_runs import train

SKIP = 20
CASES: dict[str, tuple[int, set[int], dict[str, Any]]] = {
    "one worker, one core": (1, {0}, {}),
    "allreduce fp32": (2, {0, 1}, {"strategy": "allreduce"}),
    "allreduce bf16": (2, {0, 1}, {"strategy": "allreduce", "codec": "bf16"}),
    "diloco H=50 mxfp4": (2, {0, 1}, {"strategy": "diloco", "sync_interval": 50}),
}


def measure(case: str, steps: int) -> float:
    """Return samples/s of one run."""
    workers, cores, options = CASES[case]
    os.sched_setaffinity(0, cores)
    common = {
        "max_steps": steps,
        "eval_interval": 0,
        "eval_before": "false",
        "eval_generate": "false",
        "max_eval_samples": 8,
        "snapshot_interval": 0,
        "threads": 1,
    }
    return train("demo-scratch", workers, common | options).samples_per_second(SKIP)


def main() -> None:
    """Run the cases in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(measure(arguments.case, arguments.steps))
        return
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(arguments.pairs):
        for case in CASES:
            command = [sys.executable, __file__, "--case", case, "--steps", str(arguments.steps)]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[case].append(float(out.splitlines()[-1]))
    single = found["one worker, one core"]
    print("| case | samples/s (median) | ratio to one worker (median of pairs, min..max) |\n|---|---|---|")
    for case, values in found.items():
        ratios = [v / s for v, s in zip(values, single, strict=True)]
        low, high = min(ratios), max(ratios)
        print(f"| {case} | {statistics.median(values):.1f} | {statistics.median(ratios):.2f} ({low:.2f}..{high:.2f}) |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
