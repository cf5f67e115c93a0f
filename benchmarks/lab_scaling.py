"""One, two and four small machines on the demo task: samples/s, loss at equal samples, and the same job elsewhere.

    .venv/bin/python benchmarks/lab_scaling.py [--samples 12800] [--torchft PYTHON] [--json FILE]

Needs root: the machines are lab hosts of 0.4 core each on links of 100 Mbit/s. Samples/s is taken from the members'
step events between the first steps (one whole synchronisation interval for DiLoCo) and the last: start, evaluation and
the model's saving are left out, every synchronisation is in. Supervisor and hub run on the controller, outside the
quotas and behind a link that is not shaped; so do store and lighthouse of the others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cost_model
from lab_runs import BenchLab, write_rows
from local_runs import Measured

NAMES = ("a", "b", "c", "d")
BATCH = 16
INTERVAL = 50
WEIGHTS = 600_576
"""Weights of the demo's model."""
COMMON = {
    "batch_size": BATCH,
    "eval_interval": 0,
    "eval_before": "false",
    "eval_generate": "false",
    "max_eval_samples": 320,
    "snapshot_interval": 0,
    "threads": 1,
}


class Scaling:
    """The rows of the table, one run each."""

    def __init__(self, lab: BenchLab, samples: int) -> None:
        self.lab = lab
        self.samples = samples
        self.rows: list[dict[str, Any]] = []
        self.single: Measured | None = None
        self.compute = 0.0

    def options(self, members: int, steps: int) -> dict[str, Any]:
        """The demo with a course of the learning rate that fits ``steps``."""
        return COMMON | {"max_steps": steps, "warmup_steps": max(1, steps // 10)}

    def prepare(self) -> None:
        """Fill the caches of all hosts."""
        self.lab.train(NAMES, "demo", COMMON | {"max_steps": 1, "warmup_steps": 1, "engine": "hub", "strategy": "allreduce"})

    def diloco(self, members: int) -> None:
        steps = self.samples // BATCH // members
        options = self.options(members, steps) | {"strategy": "diloco", "sync_interval": INTERVAL, "codec": "mxfp4"}
        run = self.lab.train(NAMES[:members], "demo", options | {"engine": "hub"})
        size = cost_model.payload(WEIGHTS, "mxfp4")
        exchange = cost_model.star(size, 100) if members > 1 else 0.0
        name = "one host" if members == 1 else f"diloco H={INTERVAL} mxfp4, hub"
        if members == 1:
            self.single = run
            self.compute = BATCH / run.samples_per_second(INTERVAL)
        self.add(name, members, 100, run, INTERVAL, cost_model.periodic(self.compute, exchange, INTERVAL))

    def allreduce(self, members: int, mbit: float, engine: str, steps: int, skip: int) -> None:
        self.lab.set_rate(mbit)
        options = self.options(members, steps) | {"strategy": "allreduce", "codec": "bf16", "engine": engine}
        run = self.lab.train(NAMES[:members], "demo", options)
        size = cost_model.payload(WEIGHTS, "bf16")
        exchange = cost_model.star(size, mbit) if engine == "hub" else cost_model.ring(size, members, mbit)
        self.add(f"allreduce bf16, {engine}", members, mbit, run, skip, cost_model.per_step(self.compute, exchange))
        self.lab.set_rate(100)

    def add(self, name: str, members: int, mbit: float, run: Measured, skip: int, predicted: float) -> None:
        """Note a run."""
        steps = [e for rank in range(members) for e in run.steps(rank) if e.step > skip]
        speed = run.samples_per_second(skip)
        assert self.single is not None
        row = {
            "case": name,
            "hosts": members,
            "Mbit/s": f"{mbit:g}",
            "samples/s": f"{speed:.1f}",
            "ratio to one host": f"{speed / self.single.samples_per_second(INTERVAL):.2f}",
            "predicted": f"{members * self.compute / predicted:.2f}",
            "compute, ms a step": f"{1000 * statistics.fmean(e.compute for e in steps):.0f}",
            "wait, ms a step": f"{1000 * statistics.fmean(e.wait for e in steps):.1f}",
            "samples": sum(e.samples for rank in range(members) for e in run.steps(rank)),
            "validation loss": f"{run.final_loss():.4f}",
        }
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)


def main() -> None:
    """Run all cases in one lab and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12_800, help="samples of the runs whose losses are compared")
    parser.add_argument("--steps", type=int, default=80, help="steps of the per-step runs")
    parser.add_argument("--cores", type=float, default=0.4)
    parser.add_argument("--only", default="", help="diloco: leave the other cases out")
    parser.add_argument("--torchft", type=Path, help="Python of an environment with torchft")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with BenchLab(NAMES, arguments.cores, 100) as lab:
        scaling = Scaling(lab, arguments.samples)
        scaling.prepare()
        for members in (1, 2, 4):
            scaling.diloco(members)
        if arguments.only != "diloco":
            for mbit in (100, 1000):
                for engine in ("hub", "torch"):
                    for members in (2, 4):
                        scaling.allreduce(members, mbit, engine, arguments.steps, arguments.steps // 4)
    write_rows(scaling.rows, arguments.json)


if __name__ == "__main__":
    main()
