"""Evaluation divided among the members, and evaluation of each member's own weights."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, StrictInt, TypeAdapter, ValidationError
from torch import nn

from profiles.errors import BadInput
from profiles.optimisation import EvaluationSettings
from training.data.batches import Samples
from training.data.sample_order import evaluation_slice
from training.exchange.base import Exchange
from training.exchange.payloads import documents, figures_by_rank
from training.hardware.device import Precision, evaluating, is_out_of_memory, move, release_memory, sample_too_large
from training.layouts.base import Layout
from training.loop.local_data import LocalSchedule
from training.loop.position import Position
from training.loop.showcase_sampling import ShowcaseSampler
from training.records.bounded_fields import LONGEST_TEXT, harmless
from training.records.events import EVALUATES, Emit, EvaluationEvent, ProgressEvent
from training.strategies.base import Strategy
from training.tasks.base import Answer, Progress, throttled
from training.tasks.outputs.predictions import BEFORE, FOLDER, NAME, write_predictions

_MOST = 1e15
"""Largest valid count."""
ROUND_SIZE = 32
"""Largest number of samples that a member evaluates in one round: a slow member must be in time for each round."""
_MOST_ROUNDS = 10_000
"""Limit of the rounds of an evaluation, however many samples a member claims to have."""
_FEW_SAMPLES = 4
"""Samples from which the time of a whole batch is expected."""
_LONG_BATCH = 3.0
"""Seconds from which on a whole batch would take too long to be measured."""
_SLOW_SAMPLE = 5.0
"""Seconds of one sample from which on several would take too long."""
_MAX_PAYLOAD = 4_000_000
"""Bytes of answers that one member sends, some 50,000 short texts; further ones are left out of the file."""
_ANSWER = TypeAdapter(tuple[StrictInt, Annotated[str, Field(max_length=LONGEST_TEXT)], bool])


class Evaluator:
    """Every member evaluates its share of a split; sums are gathered, so all see the same metrics.

    Args:
        precision: of the model's computations, with its device.
        batch_size: of this member, if ``settings`` set none for evaluations.
        stops: asked between two batches whether this member is to stop.
        warn: takes one line about each member whose figures are invalid.
        run_dir: receives the model's answers for the test split, or for the validation split if there is no test
            split: those before the first step, and those of the newest evaluation. ``None``: they are not saved.
        names: returns the name of a member for warnings.
        local: which samples each member has, where data stay on their machines: then each member evaluates its own
            samples, and the model's answers are not saved.
        round_size: largest number of samples that a member evaluates in one round.
        layout: what this process holds of the model; default: all of it.
        progress: called with phase, evaluated samples and all of this member's share, for every batch.
    """

    def __init__(
        self,
        samples: Samples,
        model: nn.Module,
        precision: Precision,
        exchange: Exchange,
        settings: EvaluationSettings,
        batch_size: int,
        stops: Callable[[], bool] = lambda: False,
        warn: Callable[[str], None] = lambda message: None,
        run_dir: Path | None = None,
        names: Callable[[int], str] = "member {}".format,
        local: LocalSchedule | None = None,
        round_size: int = ROUND_SIZE,
        layout: Layout | None = None,
        progress: Progress = lambda phase, done, total: None,
    ) -> None:
        self._local, self._round_size, self._progress = local, round_size, progress
        self._task, self._samples, self._model, self._precision = samples.task, samples, model, precision
        self._exchange, self._settings = exchange, settings
        self._answer = layout.answer if layout else functools.partial(self._task.answer, model)
        self._agreed: Callable[[Collection[int]], tuple[int, ...]] = layout.agreed if layout else tuple
        self._is_lead = layout is None or layout.part[0] == 0
        self._batch_size = settings.eval_batch_size or batch_size
        self._stops, self._warn, self._names = stops, warn, names
        self._stopped: set[int] = set()
        keeps = run_dir is not None and self._task.generates_text and local is None
        self._folder = run_dir / FOLDER if run_dir is not None and keeps else None
        self._showcase: ShowcaseSampler | None = None
        if settings.eval_showcase and run_dir is not None and local is None:
            self._showcase = ShowcaseSampler(samples, model, precision, run_dir / FOLDER, stops, warn, layout=layout)
        self._answers: list[Answer] = []
        self._left_out: set[int] = set()

    @property
    def splits(self) -> list[str]:
        """The splits that any member has."""
        return self._local.splits if self._local is not None else list(self._task.evaluation)

    def _shares(self, split: str, members: Mapping[int, int]) -> dict[int, range]:
        """Return the indices of the samples that each member evaluates, by rank."""
        if self._local is not None:
            return self._local.shares(split, members)
        return {rank: evaluation_slice(len(self._task.evaluation[split]), members, rank) for rank in members}

    def evaluate(
        self, split: str, step: int, members: Mapping[int, int], attempt: int = 0, heeds: bool = True
    ) -> EvaluationEvent | None:
        """Evaluate ``split`` with the weights the model holds.

        Args:
            members: batch sizes of the participants by rank; the same on all of them.
            attempt: number of earlier attempts after this step; members that stopped in one of them are left out.
            heeds: whether a member that stops ends the evaluation; else its share is left out.

        Returns:
            ``None`` on all members if one of them stops meanwhile: its share is unknown.
        """
        start = time.monotonic()
        if not attempt:
            self._stopped = set()
        staying = {rank: size for rank, size in members.items() if rank not in self._stopped}
        shares = self._shares(split, staying)
        name = f"eval/{split}/{step}" + (f"/{attempt}" if attempt else "")
        order, sums = self._by_length(split, shares.get(self._exchange.rank, range(0))), dict[str, float]()
        self._answers, self._left_out = [], set()
        round_count = self._round_count(shares, staying)
        self._progress(EVALUATES + split, 0, len(order))
        for round_index in range(round_count):
            part = _round_slice(len(order), round_index, round_count)
            note = functools.partial(self._note_progress, split, len(order), part.start)
            mine = self._sums(split, order[part], note)
            gathered = self._exchange.gather(f"{name}/{round_index}", json.dumps(mine).encode())
            gathered = {rank: gathered[rank] for rank in self._agreed(gathered)}
            stopped = {rank for rank, payload in gathered.items() if payload == b"null"} - self._stopped
            if stopped and (heeds or stopped == set(gathered)):
                self._stopped |= stopped
                return None
            asked = {
                rank: len(share[_round_slice(len(share), round_index, round_count)]) for rank, share in shares.items()
            }
            sums = add_sums([sums, self._add_gathered(gathered, asked)])
        shown = split == ("test" if "test" in self.splits else "validation")
        if self._folder is not None and shown:
            self._write_answers(split, step, f"{name}/answers", staying)
        event = self._event(split, step, sums, start)
        if shown and self._showcase is not None and self._folder is None and self._exchange.rank == min(staying):
            self._showcase.items(split, step)
        return event

    def _note_progress(self, split: str, total: int, begin: int, done: int) -> None:
        self._progress(EVALUATES + split, begin + done, total)

    def _round_count(self, shares: Mapping[int, range], batch_sizes: Mapping[int, int]) -> int:
        """Return the number of rounds in which members exchange sums: a round holds at least one batch of a member."""
        longest = {
            rank: max(self._round_size, self._settings.eval_batch_size or size) for rank, size in batch_sizes.items()
        }
        return min(_MOST_ROUNDS, max([1, *(-(-len(share) // longest[rank]) for rank, share in shares.items())]))

    def evaluate_alone(self, step: int, all_splits: bool) -> Iterator[EvaluationEvent]:
        """Evaluate by this member alone, with the weights that it holds: ``validation``, or all splits.

        Yields:
            The figures of each split, named by :func:`local_split`; none once this member is to stop.
        """
        for split in [split for split in self._task.evaluation if all_splits or split == "validation"]:
            start = time.monotonic()
            sums = self._sums(split, self._by_length(split, range(len(self._task.evaluation[split]))))
            if sums is None:
                return
            yield self._event(local_split(split, self._exchange.rank), step, sums, start)

    def seconds_per_sample(self, split: str) -> float:
        """Return the time in which this member alone evaluates a sample, measured with one batch, or with fewer samples
        where that takes long; 0: there is none."""
        most, seconds = min(self._batch_size, len(self._task.evaluation[split])), 0.0
        for count in (1, min(_FEW_SAMPLES, most), most) if most else ():
            start = time.monotonic()
            self._sums(split, range(count))
            seconds = (time.monotonic() - start) / count
            is_first = count == 1 < most  # what is done once only does not count from the second one on
            if seconds > _SLOW_SAMPLE or (not is_first and seconds * most > _LONG_BATCH) or count == most > 1:
                break
        return seconds

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

    def _write_answers(self, split: str, step: int, name: str, members: Mapping[int, int]) -> None:
        """Gather the model's answers; the first member writes them into the folder."""
        assert self._folder is not None
        gathered = self._exchange.gather(name, to_payload(self._answers))
        if self._exchange.rank != min(members) or not self._is_lead:
            return
        size = len(self._task.evaluation[split])
        answers = from_payloads(gathered, {rank: evaluation_slice(size, members, rank) for rank in members})
        path = self._folder / (NAME if step else BEFORE)
        if missing := size - len(answers):
            self._warn(
                f"{path.name} lacks {missing} of the {size} samples of {split}: the machines that evaluated "
                "them did not report"
            )
        predictions = self._task.predictions(split, answers)
        try:
            write_predictions(path, predictions)
        except BadInput as error:  # the figures are there all the same
            self._warn(f"{error.message}; what the model wrote is not kept")
        else:
            if step and self._showcase is not None:
                self._showcase.texts(split, step, answers, predictions)

    def _add_gathered(self, gathered: Mapping[int, bytes], asked: Mapping[int, int]) -> dict[str, float]:
        """Add the members' sums; all members alike leave out those whose sums are invalid or late.

        Args:
            asked: number of samples that each member was to evaluate.
        """
        figures = figures_by_rank({rank: payload for rank, payload in gathered.items() if rank in asked})
        sound = {rank: sums for rank, sums in figures.items() if self._is_possible(sums, asked[rank])}
        missing = {rank for rank in asked if rank not in sound} - self._left_out
        self._left_out |= missing
        if missing and self._exchange.rank == min(sound, default=None):
            names = ", ".join(map(self._names, sorted(missing)))
            self._warn(f"{names} reported no valid figures in time; the evaluation goes on without that part")
        return add_sums(sound[rank] for rank in sorted(sound))

    def _is_possible(self, figures: Mapping[str, float], share: int) -> bool:
        counts = [value for name, value in figures.items() if name in self._task.counts or name == "samples"]
        return all(0 <= count <= _MOST for count in counts) and figures.get("samples", 0.0) <= share

    def _sums(
        self, split: str, order: Sequence[int], note: Callable[[int], None] = lambda done: None
    ) -> dict[str, float] | None:
        """Return the sums over these samples; ``None`` if this member is to stop. ``note`` gets how many are done."""
        totals, at = [], 0
        with evaluating(self._model):
            while at < len(order):
                if self._stops():
                    return None
                batch = list(order[at : at + self._batch_size])
                sums = self._sums_of(split, batch)
                if sums is None:  # less at once, from here on
                    self._batch_size = -(-len(batch) // 2)
                    release_memory(self._precision.device)
                    continue
                totals.append(sums)
                at += len(batch)
                note(at)
        return add_sums(totals)

    def _by_length(self, split: str, indices: range) -> list[int]:
        """Return ``indices`` sorted by the length of the samples, the longest first."""
        lengths = self._task.evaluation_lengths(split) if indices else None
        return list(indices) if lengths is None else sorted(indices, key=lambda index: -int(lengths[index]))

    @torch.no_grad()
    def _sums_of(self, split: str, indices: list[int]) -> dict[str, float] | None:
        """Return the sums over some samples; ``None`` if they do not fit into memory together."""
        try:
            counted_batch = self._samples.evaluation_batch(split, indices)
            if counted_batch is None:
                return {}
            count, batch = counted_batch
            if not self._task.weight(batch):  # its loss is a mean over nothing
                return {"samples": float(count)}
            with self._precision.autocast():
                moved = move(batch, self._precision.device)
                sums, answers = self._answer(moved, self._settings.eval_generate)
            self._answers += answers
            return {**sums, "samples": float(count)}
        except Exception as error:  # devices say in their own classes that memory ran out; all else is raised
            if not is_out_of_memory(error):
                raise
            if len(indices) == 1:
                raise sample_too_large(error, self._precision.device, self._task.name) from error
        return None


def progress_reports(emit: Emit, position: Position, total_steps: int) -> Progress:
    """Return what reports progress as events, not too often, before the first step and after the last one: between
    them steps show it."""

    def report(phase: str, done: int, total: int | None) -> None:
        if position.step in (0, total_steps) or position.stopping.should_stop:
            emit(ProgressEvent(phase=phase, done=done, total=total))

    return throttled(report)


def evaluates_local_weights(settings: EvaluationSettings, strategy: Strategy, exchange: Exchange) -> bool:
    """Whether each member also evaluates its own weights: between two synchronisations of a strategy such as DiLoCo
    they differ, and it shows there whether averaging helps."""
    is_usual = strategy.equal == "never" and len(exchange.members) > 1
    return settings.eval_local == "on" or (settings.eval_local == "auto" and is_usual)


def local_split(split: str, rank: int) -> str:
    """Return the split name of the figures of one member's own weights: ``validation.local-1``."""
    return f"{split}.local-{rank}"


def _round_slice(amount: int, round_index: int, round_count: int) -> slice:
    return slice(amount * round_index // round_count, amount * (round_index + 1) // round_count)


def add_sums(partial_sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add dictionaries of sums key by key."""
    total: dict[str, float] = {}
    for sums in partial_sums:
        for key, value in sums.items():
            total[key] = total.get(key, 0.0) + value
    return total


def to_payload(answers: Sequence[Answer]) -> bytes:
    """Return a member's answers as bytes: as many of them as fit into a payload."""
    rows, bytes_left = [], _MAX_PAYLOAD
    for answer in answers:
        row = json.dumps([answer.sample, harmless(answer.text), int(answer.cut)])
        bytes_left -= len(row) + 1
        if bytes_left < 0:
            break
        rows.append(row)
    return f'{{"answers":[{",".join(rows)}]}}'.encode()


def from_payloads(gathered: Mapping[int, bytes], shares: Mapping[int, Collection[int]]) -> list[Answer]:
    """Return the answers of all members, each about its own share only."""
    answers: dict[int, Answer] = {}
    for rank, document in documents(gathered).items():
        rows = document.get("answers")
        for row in rows if isinstance(rows, list) else ():
            with contextlib.suppress(ValidationError):
                answer = Answer(*_ANSWER.validate_python(row))
                if answer.sample in shares.get(rank, ()):
                    answers.setdefault(answer.sample, answer)
    return [answers[sample] for sample in sorted(answers)]
