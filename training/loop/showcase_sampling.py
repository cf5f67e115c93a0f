"""The showcase of a run: a few held-out samples before and after training (:mod:`training.tasks.outputs.showcase`)."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from profiles.errors import BadInput, where_it_failed
from training.data.batches import Samples
from training.hardware.device import Precision, evaluating, is_out_of_memory, move, release_memory
from training.layouts.base import Layout
from training.records.run_files import explain
from training.tasks.base import Answer, Batch
from training.tasks.outputs.predictions import BEFORE, Prediction, read_predictions
from training.tasks.outputs.showcase import (
    FIRST,
    NAME,
    SampleOutput,
    Showcase,
    read_showcase,
    showcase_of_items,
    showcase_of_texts,
)

SECONDS = 10.0
"""Seconds after which no further sample is computed: the other members wait for this one."""


class ShowcaseSampler:
    """Writes the showcase; in a group only the member with the lowest rank does.

    Args:
        folder: of the files of evaluations; the first one there is of the first start, also after a resume.
        stops: asked between two samples whether this member is to stop.
        warn: called with the reason if nothing is shown.
        seconds: instead of :data:`SECONDS`.
        layout: what this process holds of the model; default: all of it. Of several devices the first one writes.
    """

    def __init__(
        self,
        samples: Samples,
        model: nn.Module,
        precision: Precision,
        folder: Path,
        stops: Callable[[], bool],
        warn: Callable[[str], None],
        seconds: float | None = None,
        layout: Layout | None = None,
    ) -> None:
        self._layout = layout
        self._sample_output = layout.sample_output if layout else partial(samples.task.sample_output, model)
        self._is_lead = layout is None or layout.part[0] == 0
        self._samples, self._task, self._model, self._precision = samples, samples.task, model, precision
        self._folder, self._stops, self._warn = folder, stops, warn
        self._seconds, self._gives_up = SECONDS if seconds is None else seconds, False

    def texts(self, split: str, step: int, answers: Sequence[Answer], after: Sequence[Prediction]) -> None:
        """Choose among the clips of a whole split, whose texts are all available.

        Args:
            answers: in the order of ``after``.
        """
        try:
            before = read_predictions(self._folder / BEFORE)
        except BadInput:  # the run does not evaluate before its first step
            return
        indices = {prediction.id: answer.sample for answer, prediction in zip(sorted(answers), after)}
        self._write(showcase_of_texts(split, step, before, after), split, indices)

    def items(self, split: str, step: int) -> None:
        """Compute some samples of a split: before the first step, and again after training."""
        if self._gives_up or self._stops():
            return
        try:
            self._look(split, step)
        except Exception as error:  # the user's own code may raise anything; a whole model trains on
            if self._layout and self._layout.part[1] > 1:
                raise  # the other devices wait for what this one was to compute
            self._gives_up = True
            if is_out_of_memory(error):
                release_memory(self._precision.device)
            self._warn(f"no samples are shown before and after training: {where_it_failed(error)}")

    def _look(self, split: str, step: int) -> None:
        size = len(self._task.evaluation[split])
        count = min(size, self._task.max_shown)
        indices = {f"sample {index}": index for index in (size * number // count for number in range(count))}
        if not step:
            shown = self._shown(split, indices)
            if not self._is_lead:
                return
            entries = [
                {"id": name, "prompt": sample.prompt, "exact_prompt": sample.exact_prompt,
                 "reference": sample.reference, "before": sample.generated, "first": sample.loss}
                for name, sample in shown.items()
            ]  # fmt: skip
            document = {
                "kind": self._task.showcase_kind,
                "split": split,
                "step": 0,
                "of": len(entries),
                "samples": entries,
            }
            Showcase.model_validate(document).write(self._folder / FIRST)
            return
        initial = read_showcase(self._folder / FIRST) if self._is_lead else None
        if initial is not None and initial.split != split:
            initial = None
        names = [sample.id for sample in initial.samples if sample.id in indices] if initial else []
        known_indices = {name: indices[name] for name in self._as_lead(names)}
        if not known_indices:  # the run does not evaluate before its first step
            return
        shown = self._shown(split, known_indices)
        if initial is not None:
            self._write(showcase_of_items(initial, step, shown), split, known_indices)

    def _as_lead(self, names: list[str]) -> list[str]:
        """Return the names that the first device gives."""
        return (
            cast(list[str], json.loads(self._layout.gather(json.dumps(names).encode())[0])) if self._layout else names
        )

    @torch.no_grad()
    def _shown(self, split: str, indices: dict[str, int]) -> dict[str, SampleOutput]:
        """Return the model's results for samples, as many as there is time for."""
        shown, end = dict[str, SampleOutput](), time.monotonic() + self._seconds
        with evaluating(self._model):
            for name, index in indices.items():
                counted_batch = self._samples.evaluation_batch(split, [index])
                if counted_batch is None:
                    continue
                with self._precision.autocast():
                    sample = self._sample_output(cast(Batch, move(counted_batch[1], self._precision.device)))
                caption = "" if sample.reference else self._samples.probe(split, index, self._task.caption)
                shown[name] = sample._replace(reference=caption) if caption else sample
                is_late = time.monotonic() > end
                if (self._layout.any(is_late) if self._layout else is_late) or self._stops():
                    break
        return shown

    def _write(self, chosen: Showcase | None, split: str, indices: dict[str, int]) -> None:
        if chosen is None:
            return
        with_sound = []
        for sample in chosen.samples:
            sound = self._task.sound(split, indices[sample.id])
            audio = {"soundless": sound} if isinstance(sound, str) else {"sound": base64.b64encode(sound).decode()}
            with_sound.append({**sample.model_dump(), **audio})
        try:
            document = {**chosen.model_dump(), "samples": with_sound}
            Showcase.model_validate(document).write(self._folder / NAME)
        except OSError as error:
            self._warn(f"{explain(error, self._folder / NAME)[0]}; no samples are shown")
