"""Evaluation shared over the members."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import EvaluationSettings
from training.answers import from_payloads, to_payload
from training.batches import move
from training.data import evaluation_slice
from training.events import EvaluationEvent
from training.exchange.base import Exchange
from training.exchange.documents import figures_by_rank
from training.memory import does_not_fit, give_back, is_out_of_memory
from training.modes import evaluating
from training.precision import Precision
from training.samples import Samples
from training.tasks.base import Answer, Task
from training.tasks.predictions import BEFORE, FOLDER, NAME, write_predictions

_MOST = 1e15
"""Of anything that is counted."""


class Evaluator:
    """Every member evaluates its share of a split; sums are gathered, so all see the same metrics.

    Args:
        stops: asked between two batches whether this member is to stop.
        warn: takes one line for each member that says what cannot be.
        run_dir: takes what the model wrote for each sample of the test split, or of the validation split where there is
            none: before the first step, and in the newest evaluation after it. ``None``: it is not kept.
    """

    def __init__(
        self,
        task: Task,
        samples: Samples,
        model: nn.Module,
        exchange: Exchange,
        settings: EvaluationSettings,
        batch_size: int,
        precision: Precision,
        device: torch.device,
        stops: Callable[[], bool] = lambda: False,
        warn: Callable[[str], None] = lambda message: None,
        run_dir: Path | None = None,
    ) -> None:
        self._task = task
        self._samples = samples
        self._model = model
        self._exchange = exchange
        self._settings = settings
        self._batch_size = settings.eval_batch_size or batch_size
        self._precision = precision
        self._device = device
        self._stops = stops
        self._warn = warn
        self._stopped: set[int] = set()
        self._folder = run_dir / FOLDER if run_dir is not None else None
        self._answers: list[Answer] = []

    def evaluate(
        self, split: str, step: int, members: Mapping[int, int], again: int = 0, heeds: bool = True
    ) -> EvaluationEvent | None:
        """Evaluate ``split`` with the weights the model holds.

        Args:
            members: those who take part, with their batch sizes; the same on all of them.
            again: how often it was tried after this step before; without those who stopped in the tries before.
            heeds: whether a member that says that it stops ends the evaluation; else its share is left out.

        Returns:
            ``None`` on all members if one of them stops meanwhile: nothing is known of its share.
        """
        start = time.monotonic()
        if not again:
            self._stopped = set()
        data = self._task.evaluation[split]
        staying = {rank: size for rank, size in members.items() if rank not in self._stopped}
        mine = self._sums(split, evaluation_slice(len(data), staying, self._exchange.rank))
        name = f"eval/{split}/{step}" + (f"/{again}" if again else "")
        gathered = self._exchange.gather(name, json.dumps(mine).encode())
        stopped = {rank for rank, said in gathered.items() if said == b"null"} - self._stopped
        if stopped and (heeds or stopped == set(gathered)):
            self._stopped |= stopped
            return None
        sums = self._added({rank: gathered[rank] for rank in gathered if rank in staying}, len(data), staying)
        if self._keeps(split):
            self._keep(split, step, f"{name}/answers", staying)
        return self._event(split, step, sums, start)

    def evaluate_alone(self, step: int, every: bool) -> Iterator[EvaluationEvent]:
        """Evaluate by this member alone, with the weights that it holds: ``validation``, or every split.

        Yields:
            The figures of each, under a name of their own (:func:`local_split`); none once this member is to stop.
        """
        for split in [split for split in self._task.evaluation if every or split == "validation"]:
            start = time.monotonic()
            sums = self._sums(split, range(len(self._task.evaluation[split])))
            if sums is None:
                return
            yield self._event(local_split(split, self._exchange.rank), step, sums, start)

    def _event(self, split: str, step: int, sums: dict[str, float], start: float) -> EvaluationEvent:
        samples = int(sums.pop("samples", 0.0))
        metrics = self._task.metrics(sums)
        return EvaluationEvent(
            step=step,
            split=split,
            loss=metrics.get("loss"),
            metrics=metrics,
            samples=samples,
            seconds=time.monotonic() - start,
        )

    def _keeps(self, split: str) -> bool:
        chosen = "test" if "test" in self._task.evaluation else "validation"
        return self._folder is not None and self._task.writes_texts and split == chosen

    def _keep(self, split: str, step: int, name: str, members: Mapping[int, int]) -> None:
        """Bring together what the model wrote; the first member writes it into the folder."""
        assert self._folder is not None
        gathered = self._exchange.gather(name, to_payload(self._answers))
        if self._exchange.rank != min(members):
            return
        size = len(self._task.evaluation[split])
        answers = from_payloads(gathered, {rank: evaluation_slice(size, members, rank) for rank in members})
        path = self._folder / (NAME if step else BEFORE)
        if missing := size - len(answers):
            self._warn(f"{path.name} lacks {missing} of the {size} samples of {split}: who evaluated them did not tell")
        try:
            write_predictions(path, self._task.predictions(split, answers))
        except BadInput as error:  # the figures are there all the same
            self._warn(f"{error.message}; what the model wrote is not kept")

    def _added(self, gathered: Mapping[int, bytes], size: int, staying: Mapping[int, int]) -> dict[str, float]:
        """Add what the members measured; who says what cannot be is left out, by all alike."""
        said, sound = figures_by_rank(gathered), dict[int, dict[str, float]]()
        for rank in gathered:
            share = evaluation_slice(size, staying, rank)
            if rank in said and self._is_possible(said[rank], len(share)):
                sound[rank] = said[rank]
        left_out = [f"member {rank}" for rank in sorted(gathered) if rank not in sound]
        if left_out and self._exchange.rank == min(sound, default=None):
            self._warn(f"{', '.join(left_out)} told no possible figures of its part; the evaluation is without it")
        return add_sums(sound[rank] for rank in sorted(sound))

    def _is_possible(self, said: Mapping[str, float], share: int) -> bool:
        counts = [value for name, value in said.items() if name in self._task.counts or name == "samples"]
        return all(0 <= count <= _MOST for count in counts) and said.get("samples", 0.0) <= share

    def _sums(self, split: str, indices: range) -> dict[str, float] | None:
        """Return the sums over this member's share; ``None`` if it is to stop."""
        totals, at, order = [], 0, self._by_length(split, indices)
        self._answers = []
        with evaluating(self._model):
            while at < len(order):
                if self._stops():
                    return None
                part = order[at : at + self._batch_size]
                sums = self._sums_of(split, part)
                if sums is None:  # less at once, from here on
                    self._batch_size = -(-len(part) // 2)
                    give_back(self._device)
                    continue
                totals.append(sums)
                at += len(part)
        return add_sums(totals)

    def _by_length(self, split: str, indices: range) -> list[int]:
        """Return ``indices`` with samples of like length beside each other, the longest first."""
        lengths = self._task.evaluation_lengths(split)
        return list(indices) if lengths is None else sorted(indices, key=lambda index: -int(lengths[index]))

    @torch.no_grad()
    def _sums_of(self, split: str, part: list[int]) -> dict[str, float] | None:
        """Return the sums over some samples; ``None`` if they do not fit into memory together."""
        try:
            made = self._samples.evaluation_batch(split, part)
            if made is None:
                return {}
            count, batch = made
            with self._precision.autocast():
                moved = move(batch, self._device)
                sums, answers = self._task.answer(self._model, moved, self._settings.eval_generate)
            self._answers += answers
            return {**sums, "samples": float(count)}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if len(part) == 1:
                raise does_not_fit(error, self._device, self._task.name) from error
        return None


def local_split(split: str, rank: int) -> str:
    """Return the name under which the figures of one member's own weights are told: ``validation.local-1``."""
    return f"{split}.local-{rank}"


def add_sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add dictionaries of sums key by key."""
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total
