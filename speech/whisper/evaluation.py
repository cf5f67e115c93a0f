"""Evaluate a trained Whisper on a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from profiles.optimisation import EvaluationSettings, TrainingSettings
from profiles.schema import DataSettings, ModelSettings, Profile
from speech.data.speech_dataset import clips_of_split, split_to_evaluate
from speech.whisper.samples import SpeechData
from speech.whisper.task import WhisperTask
from training.hardware.device import Precision, move
from training.inference.in_use import model_in_use
from training.tasks.base import Answer, Progress
from training.tasks.outputs.predictions import Prediction


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics and predictions of a model on one split."""

    metrics: dict[str, float]
    """``wer`` and ``cer`` (shares), ``loss``, ``samples``, audio ``hours``."""
    predictions: list[Prediction]
    """Predictions for every clip, in the order of the table."""
    precision: str = "float32"
    """Precision of the computation."""


def evaluate_model(
    model_dir: str | Path,
    dataset: str,
    split: str = "",
    device: str = "auto",
    language: str = "",
    batch_size: int = 8,
    text_column: str = "",
    max_samples: int = 0,
    cache_dir: str = "",
    max_new_tokens: int = 0,
    prompt: str = "",
    timestamps: bool | None = None,
    mixed_precision: str = "off",
    workers: int = 1,
    progress: Progress = lambda phase, done, total: None,
) -> EvaluationResult:
    """Evaluate a model on one split: by default ``test``, or all of a single table.

    Generated texts are limited as in training, by the longest transcript of the split or by ``max_new_tokens``; ``cut``
    is the share that reached the limit.

    ``prompt`` is the previous text for all generated texts (the loss is computed without it); ``timestamps`` enables or
    disables generated timestamps; ``None``: as saved
    (:meth:`speech.whisper.model.WhisperModelWrapper.configure_generation`).

    ``mixed_precision`` is that of training. A run evaluates in its training precision; by default fp32 is used here.
    ``auto`` reproduces the figures of a run, except for adapters, which are merged in the saved model.

    ``workers``: of this machine, which hold the model together.

    The validation split of a data set without one is the set of clips held out by training.

    Raises:
        BadInput: the model or the data set cannot be used, or has no such split.
    """
    profile = Profile(
        name="evaluate",
        model=ModelSettings(model_path=str(model_dir), language=language),
        data=DataSettings(dataset_path=dataset, text_column=text_column, cache_dir=cache_dir),
        training=TrainingSettings(device=device, mixed_precision=mixed_precision),
        evaluation=EvaluationSettings(eval_max_new_tokens=max_new_tokens),
    )
    task = WhisperTask(profile)
    task.wrapper.configure_generation(prompt, timestamps)
    split = split_to_evaluate(dataset, split)
    clips = clips_of_split(dataset, split, text_column)[: max_samples or None]
    data = task.prepare_split(split, clips, progress)
    with model_in_use(task, profile, workers, task.wrapper.build) as (model, precision):
        task.ensure_language(model, data)
        sums, answers = _sum_over(
            task, model, data, batch_size, precision, lambda done: progress("evaluated", done, len(data))
        )
    metrics = {**task.metrics(sums), "samples": float(len(data)), "hours": data.hours}
    return EvaluationResult(metrics, task.predictions_of(data, answers), precision.name)


@torch.no_grad()
def _sum_over(
    task: WhisperTask,
    model: nn.Module,
    data: SpeechData,
    batch_size: int,
    precision: Precision,
    report: Callable[[int], None],
) -> tuple[dict[str, float], list[Answer]]:
    sums: dict[str, float] = {}
    answers: list[Answer] = []
    # a batch generates until its last text ends, so texts of similar length are batched together, as in training
    order = sorted(range(len(data)), key=lambda index: -len(data.tokens[index]))
    for start in range(0, len(data), batch_size):
        batch = task.collate([data[index] for index in order[start : start + batch_size]], None)
        with precision.autocast():
            batch_sums, batch_answers = task.answer(model, move(batch, precision.device), generate=True)
        for name, value in batch_sums.items():
            sums[name] = sums.get(name, 0.0) + value
        answers += batch_answers
        report(min(start + batch_size, len(data)))
    return sums, answers
