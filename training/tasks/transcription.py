"""What ``transcribe`` and ``evaluate`` do with a finished model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from profiles.schema import DataSettings, EvaluationSettings, ModelSettings, Profile
from training.precision import select_device
from training.tasks.audio import AudioError, Samples, decode
from training.tasks.base import Answer, Progress
from training.tasks.predictions import Prediction
from training.tasks.speech_dataset import clips_of_split, split_to_evaluate
from training.tasks.whisper import SpeechData, WhisperTask
from training.tasks.whisper_model import WhisperModelWrapper
from training.tasks.whisper_prompt import language_code

_SEARCH = 0.2  # share of the window, to each side, in which the quietest place to cut is looked for
_FULL = 0.9  # share of the window that pieces fill on average: the rest is room to choose the cut
_QUIET = 0.1  # seconds over which loudness is measured


@dataclass(frozen=True)
class Transcript:
    """What was heard in one file."""

    file: Path
    text: str
    seconds: float
    """Length of the recording."""
    error: str = ""
    """Why the file could not be read; empty if it could."""


def transcribe(
    model_dir: str | Path,
    files: Sequence[Path],
    device: str = "auto",
    language: str = "",
    batch_size: int = 8,
    max_new_tokens: int = 440,
) -> Iterator[Transcript]:
    """Transcribe sound files of any length, in their order.

    A recording longer than the model's window is cut at its quietest places. A file that cannot be read gives a
    transcript with ``error``; the others go on.

    Raises:
        BadInput: the model cannot be used, or does not know the language.
    """
    listener = _Listener(ModelSettings(model_path=str(model_dir), language=language), device, max_new_tokens)
    return _transcribe_all(listener, files, batch_size)


@dataclass(frozen=True)
class Measured:
    """What a model reaches on one split."""

    metrics: dict[str, float]
    """``wer`` and ``cer`` (shares), ``loss``, ``samples``, audio ``hours``."""
    predictions: list[Prediction]
    """What it wrote for every clip, in the order of the table."""


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
    progress: Progress = lambda phase, done, total: None,
) -> Measured:
    """Measure what a model reaches on one split.

    The split is ``test`` where none is named, and all of a lone table.

    Generated texts are bounded as in training, by the longest transcript of the split or by ``max_new_tokens``; ``cut``
    is the share that reached the bound.

    ``prompt`` is taken as said before, by all generated texts (the loss is without it); ``timestamps`` lets the model
    write times too, or not; ``None``: as it was saved. See :meth:`WhisperModelWrapper.write_as`.

    The validation split of a data set that has none is the clips that training holds out of it.

    Raises:
        BadInput: the model or the data set cannot be used, or has no such split.
    """
    profile = Profile(
        name="evaluate",
        model=ModelSettings(model_path=str(model_dir), language=language),
        data=DataSettings(dataset_path=dataset, text_column=text_column, cache_dir=cache_dir),
        evaluation=EvaluationSettings(eval_max_new_tokens=max_new_tokens),
    )
    task = WhisperTask(profile)
    task.wrapper.write_as(prompt, timestamps)
    split = split_to_evaluate(dataset, split)
    clips = clips_of_split(dataset, split, text_column)[: max_samples or None]
    data = task.prepare_split(split, clips, progress)
    model = task.wrapper.build().eval()
    task.ensure_language(model, data)
    sums, answers = _sum_over(
        task, model.to(select_device(device)), data, batch_size, lambda done: progress(split, done, len(data))
    )
    metrics = {**task.metrics(sums), "samples": float(len(data)), "hours": data.hours}
    return Measured(metrics, task.predictions_of(data, answers))


@torch.no_grad()
def _sum_over(
    task: WhisperTask, model: nn.Module, data: SpeechData, batch_size: int, report: Callable[[int], None]
) -> tuple[dict[str, float], list[Answer]]:
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    answers: list[Answer] = []
    for start in range(0, len(data), batch_size):
        samples = [data[index] for index in range(start, min(start + batch_size, len(data)))]
        batch = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in task.collate(samples, None).items()
        }
        part, said = task.answer(model, batch, generate=True)
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
        answers += said
        report(start + len(samples))
    return sums, answers


def windows(samples: Samples, rate: int, longest: int) -> list[Samples]:
    """Cut ``samples`` into pieces of about one length, at most ``longest`` samples.

    Each cut is at the quietest place near where it would be even, so that words stay whole and no piece is a rest of
    silence, in which a model hears words that nobody said.
    """
    if len(samples) <= longest:
        return [samples] if len(samples) else []
    pieces = []
    slack = round(_SEARCH * longest)
    for left in range(math.ceil(len(samples) / (_FULL * longest)), 1, -1):
        even = len(samples) // left
        first = max(1, even - slack, len(samples) - (left - 1) * longest)
        cut = _quietest(samples, rate, first, min(longest, even + slack))
        pieces.append(samples[:cut])
        samples = samples[cut:]
    return [*pieces, samples]


def _quietest(samples: Samples, rate: int, first: int, last: int) -> int:
    """Position from ``first`` to ``last`` around which a tenth of a second is quietest."""
    half = max(1, round(_QUIET * rate / 2))
    start = max(0, first - half)
    energy = np.concatenate([[0.0], np.cumsum(samples[start : last + half].astype(np.float64) ** 2)])
    positions = np.arange(first, last + 1)
    before = np.clip(positions - half - start, 0, len(energy) - 1)
    after = np.clip(positions + half - start, 0, len(energy) - 1)
    return first + int((energy[after] - energy[before]).argmin())


class _Listener:
    """A model on its device, ready to hear windows of sound."""

    def __init__(self, settings: ModelSettings, device: str, max_new_tokens: int) -> None:
        self.wrapper = WhisperModelWrapper(settings)
        if settings.language:
            self.wrapper.check_language(language_code(settings.language), "language")
        self.device = select_device(device)
        self.model: nn.Module = self.wrapper.build().eval().to(self.device)
        self.max_new_tokens = max_new_tokens

    def windows_of(self, file: Path) -> tuple[list[Samples], float]:
        """Return the windows of a file and its length in seconds."""
        log_mel = self.wrapper.log_mel
        audio = decode(file, log_mel.rate)
        return windows(audio.samples, log_mel.rate, log_mel.n_samples), audio.seconds

    @torch.no_grad()
    def hear(self, pieces: Sequence[Samples]) -> list[str]:
        """Transcripts of windows."""
        log_mel = self.wrapper.log_mel
        features = np.stack([log_mel.fill(*log_mel(piece)) for piece in pieces])
        batch = torch.from_numpy(features).to(self.device)
        heard = self.wrapper.hear(self.model, batch)
        languages = [self.wrapper.default_language] * len(pieces)
        if not all(languages):
            languages = self.wrapper.detect_languages(self.model, heard)
        return [said.text for said in self.wrapper.generate(self.model, heard, languages, self.max_new_tokens)]


def _transcribe_all(listener: _Listener, files: Iterable[Path], batch_size: int) -> Iterator[Transcript]:
    """Fill batches with windows of several files; a file comes out when all its windows were heard."""
    queue: list[_Heard] = []
    for file in files:
        try:
            pieces, seconds = listener.windows_of(file)
        except AudioError as error:
            queue.append(_Heard(Transcript(file, "", 0.0, str(error)), [], []))
        else:
            queue.append(_Heard(Transcript(file, "", seconds), pieces, []))
        while sum(len(heard.waiting) for heard in queue) >= batch_size:
            _hear_batch(listener, queue, batch_size)
        yield from _finished(queue)
    while any(heard.waiting for heard in queue):
        _hear_batch(listener, queue, batch_size)
    yield from _finished(queue)


@dataclass
class _Heard:
    transcript: Transcript
    waiting: list[Samples]
    texts: list[str]


def _hear_batch(listener: _Listener, queue: Sequence[_Heard], batch_size: int) -> None:
    owners = [heard for heard in queue for _ in heard.waiting][:batch_size]
    pieces = [heard.waiting.pop(0) for heard in owners]
    for heard, text in zip(owners, listener.hear(pieces)):
        heard.texts.append(text)


def _finished(queue: list[_Heard]) -> Iterator[Transcript]:
    while queue and not queue[0].waiting:
        heard = queue.pop(0)
        found = heard.transcript
        yield Transcript(found.file, " ".join(filter(None, heard.texts)), found.seconds, found.error)
