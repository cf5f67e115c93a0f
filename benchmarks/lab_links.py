"""A model of Whisper tiny's shape on four machines and slow links: time of a step and efficiency beside prediction.

    .venv/bin/python benchmarks/lab_links.py [--mbit 50 200 1000] [--json FILE]

Needs root. Forward, backward and optimizer are a fixed 0.5 s of waiting (``emulated_job.py``): two cores are too few to
compute four of them. Coding, encryption and exchange are real, and all members share this machine's cores;
*compute* is the step of four members that do not exchange.
DiLoCo without overlap is measured with a short interval, because the time of a synchronisation does not depend on it:
its step is ``compute + excess / 50``, where *excess* is how much longer than the others a step with a synchronisation
takes. With overlap, and by fragments, it runs with its interval, and its step is the mean of whole rounds; *waited* is
the part of it in which training stood still for exchanges. Links are shaped from the first step to the last. About
twenty minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ideal_times
from lab_runs import BenchLab, write_rows
from local_runs import Measured

from training.records.events import StepEvent
from training.strategies.parts.outer_costs import OVERLAP, OVERLAPS
from training.strategies.streaming_diloco import StreamingOptions

NAMES = ("a", "b", "c", "d")
JOB = Path(__file__).resolve().parent / "emulated_job.py"
INTERVAL = 50
SHORT = 4
"""Interval that is really run."""
ROUNDS = 3
OVERLAPPED = "mxfp4 overlapped"
CASES: tuple[tuple[str, str], ...] = (
    ("allreduce", "fp32"),
    ("allreduce", "bf16"),
    ("diloco", "bf16"),
    ("diloco", "mxfp4"),
    ("diloco", OVERLAPPED),
    ("streaming_diloco", "mxfp4"),
)


def options(steps: int) -> dict[str, Any]:
    """Return a training of the emulated job."""
    return {
        "task": "custom",
        "model_path": f"{JOB}:build",
        "batch_size": 1,
        "threads": 1,
        "max_steps": steps,
        "warmup_steps": 1,
        "max_grad_norm": 0,
        "eval_interval": 0,
        "eval_before": "false",
        "snapshot_interval": 0,
    }


def step_seconds(run: Measured, skip: int) -> float:
    """Return the mean time of a step of the slowest member after the first ``skip``."""
    return max(statistics.fmean(e.compute + e.wait for e in run.steps(rank)[skip:]) for rank in range(len(NAMES)))


def excess_seconds(run: Measured) -> float:
    """Return how much longer a step with a synchronisation takes than one without; the first round is left out."""
    found = []
    for rank in range(len(NAMES)):
        walls = {e.step: e.compute + e.wait for e in run.steps(rank) if e.step > SHORT}
        plain = statistics.median(wall for step, wall in walls.items() if step % SHORT)
        found.append(statistics.fmean(wall - plain for step, wall in walls.items() if step % SHORT == 0))
    return max(found)


def mean_step(run: Measured, steps: int, delay: int) -> float:
    """Return the mean time of the slowest member's step in whole rounds."""
    return max(statistics.fmean(e.seconds for e in each) for each in whole_rounds(run, steps, delay))


def whole_rounds(run: Measured, steps: int, delay: int) -> list[list[StepEvent]]:
    """Return every member's steps in whole rounds, but for the first and the last, whose merge waits."""
    counted = range(INTERVAL + delay + 1, steps - INTERVAL + delay + 1)
    return [[e for e in run.steps(rank) if e.step in counted] for rank in range(len(NAMES))]


def exchange_seconds(weights: int, codec: str, mbit: float) -> float:
    """Predict one exchange."""
    size = ideal_times.payload_bytes(weights, codec)
    return ideal_times.ring(size, len(NAMES), mbit)


def measure(lab: BenchLab, case: tuple[str, str], mbit: float, weights: int, compute: float) -> dict[str, Any]:
    """Run one case and return its row."""
    strategy, codec = case
    lab.mbit = mbit
    streams = strategy == "streaming_diloco"
    overlaps = streams or codec == OVERLAPPED
    codec = codec.split()[0]
    exchange = exchange_seconds(weights, codec, mbit)
    # A plan's overlaps are tried; the shortest that hides the exchange is the one that is chosen.
    delay = next((one for one in OVERLAPS if one * compute >= exchange), OVERLAPS[-1]) if overlaps else 0
    given = {"strategy": strategy, "codec": codec}
    if streams:
        delay = OVERLAP
    if overlaps:
        steps = INTERVAL * (ROUNDS + 1)
        given |= {"sync_interval": INTERVAL, "sync_delay": delay}
    elif strategy == "diloco":
        steps = SHORT * ROUNDS
        given |= {"sync_interval": SHORT}
    else:
        steps = 4 if mbit < 100 else 7
    run = lab.train(NAMES, "nanogpt", options(steps) | given)
    if strategy != "allreduce":
        fragments = StreamingOptions().fragments if streams else 1
        exposed = max(0.0, exchange - fragments * delay * compute)
        excess = INTERVAL * (mean_step(run, steps, delay) - compute) if overlaps else excess_seconds(run)
        step, predicted = compute + excess / INTERVAL, ideal_times.periodic_step(compute, exposed, INTERVAL)
        shown = f"{excess:.2f} / {exposed:.2f}"
    else:
        step, predicted = step_seconds(run, 1), ideal_times.per_step(compute, exchange)
        shown = f"{step - compute:.2f} / {predicted - compute:.2f}"
    own = statistics.fmean(e.compute for e in run.steps(0)[1:])
    interval = f" H={INTERVAL}" if strategy != "allreduce" else ""
    rounds = whole_rounds(run, steps, delay) if overlaps else []
    waited = max((statistics.fmean(e.wait for e in each) for each in rounds), default=0.0)
    row = {
        "Mbit/s": f"{mbit:g}",
        "case": f"{strategy}{interval} {codec}{f', D={delay}' if delay else ''}",
        "step, s": f"{step:.3f}",
        "predicted, s": f"{predicted:.3f}",
        "efficiency, %": f"{100 * compute / step:.1f}",
        "predicted, %": f"{100 * compute / predicted:.1f}",
        "exposed exchange, s / predicted": shown,
        "waited, %": f"{100 * waited / step:.2f}" if overlaps else "",
        "compute in the run, s": f"{own:.3f}",
    }
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000, 200, 50])
    parser.add_argument("--cases", nargs="+", help="only these, for example: 'diloco mxfp4 overlapped'")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from emulated_job import EmulatedWhisper

    weights = EmulatedWhisper().weights()
    rows: list[dict[str, Any]] = []
    with BenchLab(NAMES, 2.0, 1000) as lab:
        apart = lab.train(NAMES, "nanogpt", options(24) | {"strategy": "diloco", "sync_interval": 1000})
        compute = step_seconds(apart, 2)
        print(f"{weights} weights; a step of four members that do not exchange: {compute:.3f} s", flush=True)
        try:
            for mbit in arguments.mbit:
                for case in CASES:
                    if arguments.cases and " ".join(case) not in arguments.cases:
                        continue
                    rows.append(measure(lab, case, mbit, weights, compute))
        finally:
            write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
