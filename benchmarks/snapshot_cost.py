"""What a snapshot costs the training, in one run: blocks of steps that begin with one, and blocks without, in turns.

    .venv/bin/python benchmarks/snapshot_cost.py [--width 512] [--layers 8] [--steps 40] [--pairs 6] [--folder DIR]

A GPT of ordinary size with AdamW trains through the same core as every run. The difference between the two blocks of a
pair holds all of it: the copy that training waits for, and how hashing and writing it beside the training slow the
steps. The share of the time at the default interval follows from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, LENGTH, VOCABULARY = 4, 64, 8192


def _task(width: int, layers: int) -> Any:
    import torch
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel

    from training.tasks.base import Task

    class Texts(Task):
        name = "texts"

        def prepare(self, progress: Any) -> None:
            self.train = list(torch.randint(0, VOCABULARY, (512, LENGTH), generator=torch.Generator().manual_seed(0)))
            self.evaluation = {}

        def build_model(self) -> nn.Module:
            heads = max(1, width // 64)
            sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": width, "n_layer": layers}
            model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, n_head=heads, use_cache=False))
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


def measure(task: Any, steps: int, pairs: int, folder: Path) -> dict[str, Any]:
    """Return what a snapshot cost, pair by pair; a first pair warms up and is dropped.

    Raises:
        RuntimeError: a snapshot was not on the disk within its block, so that the block without one is not free of it.
    """
    from profiles.optimisation import EvaluationSettings, SnapshotSettings, TrainingSettings
    from profiles.schema import Profile
    from training.exchange.base import SoloExchange
    from training.loop.trainer import Trainer
    from training.records.events import SnapshotEvent, StepEvent
    from training.run.local_plan import plan_local_run
    from training.run.orders import Control

    last = 2 * steps * (pairs + 2)
    profile = Profile(
        name="bench",
        training=TrainingSettings(max_steps=last, batch_size=BATCH, mixed_precision="off"),
        evaluation=EvaluationSettings(eval_interval=0, eval_before=False),
        snapshot=SnapshotSettings(snapshot_interval=2 * steps),
    )
    ends: dict[int, float] = {}
    written: list[SnapshotEvent] = []
    after: list[int] = []

    def emit(event: Any) -> None:
        if isinstance(event, StepEvent):
            ends[event.step] = time.perf_counter()
        if isinstance(event, SnapshotEvent):
            written.append(event)
            after.append(max(ends))

    trainer = Trainer(plan_local_run(profile, 1), 0, task, SoloExchange(), emit, Control(), folder)
    trainer.run()
    if late := [event.step for event, step in zip(written, after, strict=True) if step >= event.step + steps]:
        raise RuntimeError(f"the snapshots of steps {late} took longer than {steps} steps: take more --steps")
    starts = range(4 * steps, last - steps, 2 * steps)
    with_one = [ends[start + steps] - ends[start] for start in starts]
    without = [ends[start + 2 * steps] - ends[start + steps] for start in starts]
    extra = [a - b for a, b in zip(with_one, without, strict=True)]
    cost, default = statistics.median(extra), SnapshotSettings().seconds
    return {
        "weights": sum(parameter.numel() for parameter in trainer.parameters),
        "bytes": written[-1].bytes,
        "step seconds": statistics.median(without) / steps,
        "seconds until on the disk": statistics.median(event.seconds for event in written),
        "training waited": trainer.writer.cost().waited,
        "seconds a snapshot": {"median": cost, "each": [round(value, 3) for value in extra]},
        "share at the default interval": cost / (default + cost),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("--width", 512), ("--layers", 8), ("--steps", 40), ("--pairs", 6)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--folder", help="on the disk that is measured; default: a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = measure(_task(given.width, given.layers), given.steps, given.pairs, Path(folder))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
