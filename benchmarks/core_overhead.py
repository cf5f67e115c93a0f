"""Steps/s, processor time and peak memory of the core with one worker against a bare PyTorch loop, same model and data.

    .venv/bin/python benchmarks/core_overhead.py [--steps 60] [--pairs 7] [--json FILE]

Both run at once, each in a process of its own with one thread, and take turns block by block while the other waits; who
begins changes from pair to pair. A block is ``--steps`` steps, and ratios are taken pair by pair, so what the machine
does besides meets both alike. About four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KINDS = ("bare", "core")
BATCH, LENGTH, VOCABULARY = 8, 128, 512


class Pace:
    """Lets a loop run a block of steps whenever the parent says so, and tells what each block took."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._begin()

    def step(self) -> None:
        """Note that a step is done."""
        self._done += 1
        if self._done % self._steps:
            return
        block = {
            "wall": (time.perf_counter() - self._wall) / self._steps,
            "cpu": (time.process_time() - self._cpu) / self._steps,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(block), flush=True)
        self._begin()

    def _begin(self) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def _data() -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, VOCABULARY, (512, LENGTH), generator=generator))


def _model() -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=192, n_layer=4, n_head=4, use_cache=False)
    )


def bare(steps: int, blocks: int) -> None:
    """The loop as anyone would write it."""
    import torch

    from profiles.optimisation import TrainingSettings
    from training.optimization.optimizers import build_optimizer

    data, model = _data(), _model()
    model.train()
    optimizer = build_optimizer(model, TrainingSettings())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    order = torch.randperm(len(data)).tolist()
    pace = Pace(steps)
    for step in range(steps * blocks):
        picked = [data[order[(step * BATCH + i) % len(order)]] for i in range(BATCH)]
        batch = torch.stack(picked)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        pace.step()


def core(steps: int, blocks: int) -> None:
    """The same through Trainer, schedule, and events to a file."""
    from profiles.optimisation import EvaluationSettings, SnapshotSettings, TrainingSettings
    from profiles.schema import Profile, StrategySettings
    from training.exchange.base import SoloExchange
    from training.loop.trainer import Trainer
    from training.records.event_log import EventSink
    from training.records.events import RunEvent, StepEvent
    from training.run.local_plan import plan_local_run
    from training.run.orders import Control

    task = _task()
    profile = Profile(
        name="bench",
        training=TrainingSettings(max_steps=steps * blocks + 1, batch_size=BATCH, mixed_precision="off"),
        evaluation=EvaluationSettings(eval_interval=0, eval_before=False),
        snapshot=SnapshotSettings(snapshot_interval=0),
        strategy=StrategySettings(strategy="allreduce"),
    )
    paces: list[Pace] = []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "events.jsonl").open("w") as stream:
        sink = EventSink(stream, 0)

        def emit(event: Any) -> None:
            sink(event)
            if isinstance(event, RunEvent):
                paces.append(Pace(steps))
            elif isinstance(event, StepEvent):
                paces[0].step()

        Trainer(plan_local_run(profile, 1), 0, task, SoloExchange(), emit, Control(), Path(folder)).run()


def _task() -> Any:
    import torch
    from torch import nn

    from training.tasks.base import Task

    class Texts(Task):
        name = "texts"

        def prepare(self, progress: Any) -> None:
            self.train, self.evaluation = _data(), {}

        def build_model(self) -> nn.Module:
            model: nn.Module = _model()
            return model

        def collate(self, samples: Any, rngs: Any) -> Any:
            batch = torch.stack(list(samples))
            return {"input_ids": batch, "labels": batch}

        def weight(self, batch: Any) -> float:
            return float(len(batch["labels"]))

        def loss(self, model: nn.Module, batch: Any) -> Any:
            return model(**batch).loss

        def save(self, model: nn.Module, directory: Path) -> None:
            """Nothing to keep."""

    task = Texts()
    task.prepare(None)
    return task


def run_kind(kind: str, steps: int, blocks: int) -> None:
    """Body of one process."""
    import torch

    torch.set_num_threads(1)
    {"bare": bare, "core": core}[kind](steps, blocks)


def measure(steps: int, pairs: int) -> list[dict[str, dict[str, float]]]:
    """Return what each block took, pair by pair; a first pair warms up and is dropped."""
    processes = {
        kind: subprocess.Popen(
            [sys.executable, __file__, "--kind", kind, "--steps", str(steps), "--pairs", str(pairs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for kind in KINDS
    }
    measured = []
    for pair in range(pairs + 1):
        order = KINDS if pair % 2 else reversed(KINDS)
        measured.append({kind: _block(processes[kind]) for kind in order})
        print(json.dumps(measured[-1]), file=sys.stderr)
    for process in processes.values():
        process.communicate()
    return measured[1:]


def _block(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a loop ended early; its error is above")
    block: dict[str, float] = json.loads(line)
    return block


def table(pairs: list[dict[str, dict[str, float]]]) -> str:
    """Return the pairs as a Markdown table."""
    lines = ["| figure | bare loop | core | core / bare, median of pairs (min..max) |", "|---|---|---|---|"]
    figures: dict[str, Callable[[dict[str, float]], float]] = {
        "steps/s": lambda block: 1 / block["wall"],
        "processor time, ms a step": lambda block: 1e3 * block["cpu"],
        "peak memory, MB": lambda block: block["peak_mb"],
    }
    for name, figure in figures.items():
        values = {kind: [figure(pair[kind]) for pair in pairs] for kind in KINDS}
        lines.append(f"| {name} | {_row(values['bare'], values['core'])} |")
    return "\n".join(lines)


def _row(bare: Iterable[float], core: Iterable[float]) -> str:
    bare, core = list(bare), list(core)
    ratios = [ours / theirs for theirs, ours in zip(bare, core)]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
    return f"{statistics.median(bare):.2f} | {statistics.median(core):.2f} | {spread}"


def main() -> None:
    """Measure pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of one block")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        return run_kind(arguments.kind, arguments.steps, arguments.pairs + 1)
    pairs = measure(arguments.steps, arguments.pairs)
    print(table(pairs))
    if arguments.json:
        arguments.json.write_text(json.dumps(pairs, indent=1) + "\n")


if __name__ == "__main__":
    main()
