"""Steps/s and peak memory of the core with one worker against a bare PyTorch loop on the same model and data.

    .venv/bin/python benchmarks/core_overhead.py [--steps 150] [--pairs 5] [--json FILE]

Each measurement is a process of its own; the two kinds take turns, and the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WARMUP = 20
BATCH, LENGTH, VOCABULARY = 8, 128, 512


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


def bare(steps: int) -> float:
    """The loop as anyone would write it; return seconds a step."""
    import torch

    from profiles.schema import TrainingSettings
    from training.optimizer import build_optimizer

    data, model = _data(), _model()
    model.train()
    optimizer = build_optimizer(model, TrainingSettings())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    order = torch.randperm(len(data)).tolist()
    begin = 0.0
    for step in range(steps + WARMUP):
        if step == WARMUP:
            begin = time.perf_counter()
        picked = [data[order[(step * BATCH + i) % len(order)]] for i in range(BATCH)]
        batch = torch.stack(picked)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    return (time.perf_counter() - begin) / steps


def core(steps: int) -> float:
    """The same through Trainer, schedule, events to a file; return seconds a step."""
    from profiles.schema import EvaluationSettings, Profile, SnapshotSettings, StrategySettings, TrainingSettings
    from training.control import Control
    from training.events import EventSink, StepEvent
    from training.exchange.solo import SoloExchange
    from training.local_plan import plan_local_run
    from training.trainer import Trainer

    task = _task()
    profile = Profile(
        name="bench",
        training=TrainingSettings(max_steps=steps + WARMUP, batch_size=BATCH, mixed_precision="off"),
        evaluation=EvaluationSettings(eval_interval=0, eval_before=False),
        snapshot=SnapshotSettings(snapshot_interval=0),
        strategy=StrategySettings(strategy="allreduce"),
    )
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        sink = EventSink((Path(folder) / "events.jsonl").open("w"), 0)

        def emit(event: Any) -> None:
            sink(event)
            if isinstance(event, StepEvent):
                times.append(time.perf_counter())

        Trainer(plan_local_run(profile, 1), 0, task, SoloExchange(), emit, Control(), Path(folder)).run()
    return (times[-1] - times[WARMUP - 1]) / steps


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


def measure(kind: str, steps: int) -> dict[str, float]:
    """Run one kind in this process."""
    import torch

    torch.set_num_threads(1)
    seconds = {"bare": bare, "core": core}[kind](steps)
    return {"steps_per_second": 1 / seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    """Measure pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=["bare", "core"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        print(json.dumps(measure(arguments.kind, arguments.steps)))
        return
    pairs = []
    for _ in range(arguments.pairs):
        pair = {}
        for kind in ("bare", "core"):
            command = [sys.executable, __file__, "--kind", kind, "--steps", str(arguments.steps)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            pair[kind] = json.loads(out.splitlines()[-1])
        pairs.append(pair)
    print("| figure | bare loop | core | core / bare (median of pairs, min..max) |\n|---|---|---|---|")
    for key in ("steps_per_second", "peak_mb"):
        ratios = [p["core"][key] / p["bare"][key] for p in pairs]
        medians = [statistics.median(p[kind][key] for p in pairs) for kind in ("bare", "core")]
        print(
            f"| {key} | {medians[0]:.2f} | {medians[1]:.2f} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f}) |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(pairs, indent=1))


if __name__ == "__main__":
    main()
