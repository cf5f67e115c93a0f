"""Does ``torch.compile`` pay for a Whisper's training on this machine? Forward and backward, eager beside compiled.

    .venv/bin/python benchmarks/whisper_compile.py --model FOLDER [--window auto] [--steps 40] [--batch 16]

Each block is compiled by itself, so that alike blocks share their code. All ways stand in one process and take turns
step by step on the same batches; processor time and seconds of the steps after the first pass over all window lengths
count, and what the first ones took beyond is the start. Needs a C++ compiler. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch import nn

from profiles.files.resolve import profile_from_options
from speech.whisper.model import unwrap
from speech.whisper.task import WhisperTask

WAYS: dict[str, dict[str, Any] | None] = {"eager": None, "compiled": {}, "compiled, dynamic": {"dynamic": True}}


def built(task: WhisperTask, way: dict[str, Any] | None) -> nn.Module:
    """Return a model whose blocks are compiled as a way says."""
    model = task.build_model().train()
    if way is not None:
        whisper = unwrap(model).model
        for block in (*whisper.encoder.layers, *whisper.decoder.layers):
            block.compile(**way)
    return model


def batches_of(task: WhisperTask, size: int, steps: int) -> list[Any]:
    """Return batches of like windows, of each length in turn."""
    lengths = task.lengths()
    count = len(task.train)
    order = sorted(range(count), key=lambda index: int(lengths[index])) if lengths is not None else list(range(count))
    parts = [order[at : at + size] for at in range(0, count - size + 1, size)]
    chosen = [parts[(step * max(1, len(parts) // 8)) % len(parts)] for step in range(steps)]
    return [task.collate([task.train[index] for index in part], []) for part in chosen]


def step(task: WhisperTask, model: nn.Module, batch: Any, half: bool) -> tuple[float, float]:
    """Compute one step's gradients; return processor time and seconds."""
    busy, start = time.process_time(), time.monotonic()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = task.loss(model, batch)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return time.process_time() - busy, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--window", default="auto")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options = {"model_path": arguments.model, "dataset_path": str(ROOT / "examples" / "spoken_commands")}
    profile = profile_from_options("compile", {**options, "window": arguments.window, "max_eval_samples": 2,
                                               "max_train_samples": 512})  # fmt: skip
    task = WhisperTask(profile)
    task.device = torch.device("cpu")
    task.prepare(lambda *_: None)
    batches = batches_of(task, arguments.batch, arguments.steps)
    models = {name: built(task, way) for name, way in WAYS.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for batch in batches:
        for name, model in models.items():
            taken[name].append(step(task, model, batch, arguments.bf16))
    warm = len({batch["input_features"].shape[-1] for batch in batches}) * 2 if arguments.steps > 16 else 1
    print("| way | processor time of a step | of it eager | seconds | start, processor time | start, seconds |")
    print("|---|---|---|---|---|---|")
    eager = [sum(one[i] for one in taken["eager"][warm:]) / (len(batches) - warm) for i in (0, 1)]
    for name, each in taken.items():
        mean = [sum(one[i] for one in each[warm:]) / (len(batches) - warm) for i in (0, 1)]
        start = [sum(one[i] for one in each[:warm]) - warm * mean[i] for i in (0, 1)]
        steps = f"{mean[0]:.2f} s | {mean[0] / eager[0]:.2f} | {mean[1]:.2f} s"
        print(f"| {name} | {steps} | {start[0]:.0f} s | {start[1]:.0f} s |")


if __name__ == "__main__":
    main()
