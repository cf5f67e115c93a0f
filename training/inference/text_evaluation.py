"""Evaluate a trained language model on the texts, or the responses, of a data set."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from profiles.errors import BadInput
from profiles.optimisation import TrainingSettings
from profiles.schema import CAUSAL_LM, DataSettings, ModelSettings, Profile
from training.hardware.device import move
from training.inference.in_use import model_in_use
from training.records.plan import read_plan
from training.tasks.base import Progress
from training.tasks.pretrained import adapter_folder, base_of, from_pretrained
from training.tasks.text.causal_lm import CausalLMTask

_BATCH = 8


@dataclass(frozen=True)
class TextResult:
    """Metrics of a language model on one split."""

    metrics: dict[str, float]
    """``loss`` (nats per token), ``perplexity``, ``samples`` and ``tokens`` (predicted ones)."""
    split: str
    block_size: int
    """Maximum length of a sample in tokens, which affects the loss: longer contexts improve predictions."""
    precision: str
    """Precision of the computation."""


@torch.no_grad()
def evaluate_text(
    model_dir: Path,
    dataset: str,
    split: str = "",
    device: str = "auto",
    mixed_precision: str = "off",
    progress: Progress = lambda phase, done, total: None,
    workers: int = 1,
) -> TextResult:
    """Evaluate a model on one split: by default ``test``, else ``validation``; of a single file all of it.

    ``workers``: of this machine, which hold the model together.

    Raises:
        BadInput: the model or the data set cannot be used, or has no such split.
    """
    training = TrainingSettings(device=device, mixed_precision=mixed_precision)
    profile = _profile_of(model_dir, dataset).model_copy(update={"training": training})
    task = CausalLMTask(profile)
    lone = Path(dataset).expanduser().is_file()
    splits = task.read(progress, hold_out=not lone)
    split = split or ("train" if lone else "test" if "test" in splits else "validation")
    if split not in splits:
        raise BadInput(f"data set {dataset} has no split {split!r}", f"it has: {', '.join(splits)}")
    samples, total = splits[split], Counter[str]()
    with model_in_use(task, profile, workers) as (model, precision):
        for start in range(0, len(samples), _BATCH):
            end = min(start + _BATCH, len(samples))
            batch = move(task.collate([samples[index] for index in range(start, end)], None), precision.device)
            with precision.autocast():
                total.update(task.evaluate(model, batch, generate=False))
            progress("evaluated", end, len(samples))
    metrics = {**task.metrics(total), "samples": float(len(samples)), "tokens": total["weight"]}
    return TextResult(metrics, split, task.profile.data.block_size, precision.name)


def _profile_of(model_dir: Path, dataset: str) -> Profile:
    """Return a profile with the block size that the model was trained with, if known."""
    model = ModelSettings(task=CAUSAL_LM, model_path=str(model_dir))
    try:
        size = read_plan(model_dir.parent / "plan.json").profile.data.block_size
    except BadInput:
        size = DataSettings().block_size
        adapter = adapter_folder(str(model_dir))
        config: Any = from_pretrained(AutoConfig, base_of(adapter) if adapter else str(model_dir), "model")
        size = min(size, getattr(config, "max_position_embeddings", None) or size)
    return Profile(name="evaluate", model=model, data=DataSettings(dataset_path=dataset, block_size=size))
