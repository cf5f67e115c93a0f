"""Memory of a Whisper's training: what the memory model predicts beside what a process really took.

    .venv/bin/python benchmarks/whisper_memory.py --model FOLDER [--json FILE] [--rows TEXT ...] [--shape small]
        [--device cuda]

Every row is a process of its own that takes two steps as a run would, at the longest clips of the data set; its peak is
what the system counts as resident, or on a GPU what PyTorch has taken of its memory. With ``--json`` the rows measured
before are not measured again, and only the prediction is made anew. ``--shape`` takes the shape of another Whisper,
with random weights, beside the vocabulary of FOLDER. Prints a Markdown table. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from distributed.planning.memory.memory_model import need_of
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from training.hardware.device import release_memory, select_device
from training.tasks.registry import size_for

DATA = ROOT / "examples" / "spoken_commands"
SHAPES = {
    "tiny": {"d_model": 384, "heads": 6, "ffn_dim": 1536, "layers": 4},
    "small": {"d_model": 768, "heads": 12, "ffn_dim": 3072, "layers": 12},
    "medium": {"d_model": 1024, "heads": 16, "ffn_dim": 4096, "layers": 24},
    "large": {"d_model": 1280, "heads": 20, "ffn_dim": 5120, "layers": 32},
}
"""Radford et al. 2022, table 1."""


@dataclass(frozen=True)
class Row:
    """One way to train."""

    name: str
    options: dict[str, Any]


def rows() -> Iterator[Row]:
    """Yield every row of the table."""
    tunings = {"full": {}, "LoRA": {"tuning": "lora"}, "encoder frozen": {"freeze_encoder": True}}
    for (tuning, options), window, batch in product(tunings.items(), ("full", "auto"), (4, 16)):
        row = {**options, "window": window, "batch_size": batch, "eval_interval": int((window, batch) == ("auto", 4))}
        yield Row(f"{tuning}, {window} windows, batch {batch}", row)
    for window, precision, checkpointing in product(("full", "auto"), ("off", "bf16"), (False, True)):
        if precision == "off" and not checkpointing:
            continue
        options = {"window": window, "mixed_precision": precision, "gradient_checkpointing": checkpointing}
        words = [*(["bf16"] if precision == "bf16" else []), *(["checkpointing"] if checkpointing else [])]
        name = f"full, {window} windows, batch 16, {', '.join(words)}"
        yield Row(name, {**options, "batch_size": 16})
    both = {"tuning": "lora", "gradient_checkpointing": True, "window": "full", "batch_size": 16}
    yield Row("LoRA, full windows, batch 16, checkpointing", both)
    for window, batch in (("full", 4), ("auto", 4)):
        eight = {"tuning": "lora", "base_precision": "int8", "window": window, "batch_size": batch}
        yield Row(f"LoRA on int8, {window} windows, batch {batch}", eight)
    yield Row(
        "LoRA, full windows, batch 16, bf16", {**both, "gradient_checkpointing": False, "mixed_precision": "bf16"}
    )


def profile_of(row: Row, model: str, device: str) -> Profile:
    """Return the profile of a row."""
    base: dict[str, Any] = {"model_path": model, "dataset_path": str(DATA), "mixed_precision": "off", "max_steps": 9}
    base |= {"eval_interval": 0, "device": device}
    base |= {"max_train_samples": 64, "max_eval_samples": 16, "eval_batch_size": 16}
    return profile_from_options("memory", {**base, **row.options})


def measure(profile: Profile) -> dict[str, int]:
    """Take a step as a run would that has taken some before, then evaluate a batch; return the peaks in bytes."""
    from training.exchange.base import SoloExchange
    from training.loop.trainer import Trainer
    from training.run.local_plan import plan_local_run
    from training.run.orders import Control
    from training.tasks.registry import task_from_profile
    from training.trial.short_run import peak_memory

    task = task_from_profile(profile)
    task.device = select_device(profile.training.device)
    task.prepare(lambda *_: None)
    plan = plan_local_run(profile, 1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, 0, task, SoloExchange(), lambda event: None, Control(), Path(folder))
        trainer._set_up()
        trainer._take_starting_state()
        for parameter in trainer.parameters:  # the optimizer's state, as after a first step
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        forget_peak(task.device)
        trainer._step()
        training = peak_memory(task.device)
        forget_peak(task.device)
        if profile.evaluation.eval_interval:
            trainer._evaluate(["validation"])
        trainer.source.close()
    return {"training": training, "evaluation": peak_memory(task.device)}


def forget_peak(device: torch.device) -> None:
    """Let the peak of this process begin anew, where the system can (proc(5), clear_refs)."""
    if device.type == "cuda":
        release_memory(device)
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def shaped(folder: Path, shape: str, target: Path) -> Path:
    """Return a folder with random weights of another shape, and the vocabulary of ``folder``."""
    import shutil

    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size = SHAPES[shape]
    changes = {"d_model": size["d_model"]}
    for part in ("encoder", "decoder"):
        changes |= {f"{part}_layers": size["layers"], f"{part}_attention_heads": size["heads"]}
        changes |= {f"{part}_ffn_dim": size["ffn_dim"]}
    config = WhisperConfig(**{**json.loads((folder / "config.json").read_text()), **changes})
    for path in folder.glob("*.json"):
        shutil.copy(path, target / path.name)
    WhisperForConditionalGeneration(config).save_pretrained(str(target))
    return target


def own_process(row: Row, model: str, device: str) -> dict[str, int]:
    """Measure a row in a process of its own."""
    command = [sys.executable, __file__, "--one", profile_of(row, model, device).model_dump_json(), "--model", model]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], help="only rows with one of these texts in the name")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(Profile.model_validate_json(arguments.one))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(arguments.model).resolve())
        if arguments.shape:
            model = str(shaped(Path(model), arguments.shape, Path(folder)))
        compare(model, arguments)


def compare(model: str, arguments: argparse.Namespace) -> None:
    """Print the table."""
    kept = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    print("| trained | predicted | measured | predicted / measured |\n|---|---|---|---|")
    for row in rows():
        if arguments.rows and not any(text in row.name for text in arguments.rows):
            continue
        name = ", ".join(filter(None, (arguments.shape, "GPU" * (arguments.device == "cuda"), row.name)))
        kept[name] = measured = kept.get(name) or own_process(row, model, arguments.device)
        if arguments.json:
            arguments.json.write_text(json.dumps(kept, indent=1))
        for line in lines(name, measured, profile_of(row, model, arguments.device)):
            print(line, flush=True)


def lines(name: str, measured: Mapping[str, int], profile: Profile) -> Iterator[str]:
    """Yield the lines of a row in the table."""
    size = size_for(profile)
    assert size is not None
    need = need_of(profile, size, alone=True, on_gpu=profile.training.device == "cuda")
    yield line(name, dataclasses.replace(need, evaluation=0).total, measured["training"])
    if profile.evaluation.eval_interval:
        yield line(f"evaluation of 16: {name}", dataclasses.replace(need, step=0).total, measured["evaluation"])


def line(name: str, predicted: int, measured: int) -> str:
    """Return a line of the table."""
    return f"| {name} | {predicted / 1e9:.2f} GB | {measured / 1e9:.2f} GB | {predicted / measured:.2f} |"


if __name__ == "__main__":
    main()
