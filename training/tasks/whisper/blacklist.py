"""Samples whose transcript a model contradicts: it hears something else, and finds the transcript far less probable.

Who listens is a model that was not trained on the sample (:mod:`training.tasks.whisper.held_out`), or one that was,
which has learnt many wrong transcripts by heart.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch

from profiles.errors import BadInput
from profiles.schema import ModelSettings, Profile
from training.device import select_device
from training.tasks.base import Progress
from training.tasks.patches import BLACKLIST, FOLDER, Patches
from training.tasks.speech_clips import Clip
from training.tasks.speech_dataset import read_divided, read_tables
from training.tasks.tables import write_table
from training.tasks.whisper.features import NOISE, augment
from training.tasks.whisper.listening import DecodingResult, hear
from training.tasks.whisper.samples import SpeechData
from training.tasks.whisper.task import WhisperTask, generation_bound
from training.tasks.word_errors import ErrorRates

SPLIT = "train"
_FAST, _SLOW = 3.0, 1 / 3
"""Characters a second, as a multiple of the median, outside which a transcript hardly fits its recording."""


@dataclass(frozen=True)
class Listen:
    """One pass over the clips."""

    model: Path
    seed: int | None = None
    """Of the changes made to the sound; ``None``: it is left as it is."""


@dataclass(frozen=True)
class Doubt:
    """A clip and what was heard in it."""

    clip: Clip
    heard: tuple[str, ...]
    """In each listen."""
    wers: tuple[float, ...]
    margins: tuple[float, ...]
    """By how much the mean log-probability of a token of what was heard is above that of the transcript, in nats."""
    seconds: float
    empty: bool
    """Nothing of its transcript counts."""
    hint: str = ""
    """What is striking about its transcript."""

    @property
    def wer(self) -> float:
        """Median over the listens."""
        return statistics.median(self.wers)

    @property
    def margin(self) -> float:
        """Median over the listens, in nats."""
        return statistics.median(self.margins)

    def wrong(self, bounds: Bounds) -> int:
        """Listens that reach both bounds."""
        pairs = zip(self.wers, self.margins, strict=True)
        return sum(wer >= bounds.wer and margin >= bounds.margin for wer, margin in pairs)


@dataclass(frozen=True)
class Bounds:
    """When a sample is put on the list."""

    wer: float = 0.5
    margin: float = 2.0
    """Nats; see :attr:`Doubt.margins`."""
    repeated: int = 1
    """In how many listens at least."""
    most: float = 0.1
    """Share of the samples that may be listed."""


def plan_listens(models: Sequence[Path], count: int) -> list[Listen]:
    """Return ``count`` listens: each model once with the sound as it is, then the first with changed sound."""
    plain = [Listen(model) for model in models[:count]]
    return plain + [Listen(models[0], seed) for seed in range(count - len(plain))]


def listen(
    profile: Profile, listens: Sequence[Listen], device: str, batch_size: int, progress: Progress
) -> list[Doubt]:
    """Let models listen to the training samples of ``profile``, patches applied.

    Raises:
        BadInput: a model or the data cannot be used.
    """
    data = profile.data
    clips = read_divided(data.dataset_path, data.text_column)[SPLIT][: data.max_train_samples or None]
    passes = [judge(profile, clips, listen_pass, device, batch_size, progress) for listen_pass in listens]
    return with_hints([joined(doubts) for doubts in zip(*passes, strict=True)])


def judge(
    profile: Profile, clips: list[Clip], listen_pass: Listen, device: str, batch_size: int, progress: Progress
) -> list[Doubt]:
    """Let one model listen to clips once; those that cannot be heard are left out."""
    settings = ModelSettings(model_path=str(listen_pass.model), language=profile.model.language)
    task = WhisperTask(profile.model_copy(update={"model": settings}))
    data = task.prepare_split(SPLIT, clips, progress)
    model = task.wrapper.build()
    task.ensure_language(model, data)
    model = model.to(select_device(device))
    languages = [language or task.default_language for language in data.languages]
    bound = generation_bound(data.longest, profile.evaluation.eval_max_new_tokens, task.wrapper.room)
    phase = f"listening with {listen_pass.model}" + ("" if listen_pass.seed is None else ", noisy")
    rates, doubts = ErrorRates(), list[Doubt]()
    for start in range(0, len(data), batch_size):
        indices = range(start, min(start + batch_size, len(data)))
        batch = np.stack([_features(data, index, listen_pass.seed) for index in indices])
        features = torch.from_numpy(batch).to(next(model.parameters()).device)
        texts = [data.clips[index].text for index in indices]
        results = hear(task.wrapper, model, features, [languages[index] for index in indices], bound, texts)
        doubts += [_doubt(data, index, result, rates, languages[index]) for index, result in zip(indices, results)]
        progress(phase, len(doubts), len(data))
    return doubts


def _doubt(data: SpeechData, index: int, result: DecodingResult, rates: ErrorRates, language: str) -> Doubt:
    clip, transcript_confidence = data.clips[index], result.reference_confidence
    wer = rates.of(clip.text, result.text, language)
    margin = 0.0 if transcript_confidence is None else result.confidence - transcript_confidence
    empty = not rates.normalised(clip.text, language).strip()
    return Doubt(clip, (result.text,), (wer,), (margin,), data.store.seconds[data.positions[index]], empty)


def joined(doubts: Sequence[Doubt]) -> Doubt:
    """Return several listens to one clip as one."""
    texts, wers, margins = zip(*((doubt.heard[0], doubt.wers[0], doubt.margins[0]) for doubt in doubts), strict=True)
    return dataclasses.replace(doubts[0], heard=texts, wers=wers, margins=margins)


def _features(data: SpeechData, index: int, seed: int | None) -> np.ndarray:
    features = data.store[data.positions[index]]
    return features if seed is None else augment(features, NOISE, np.random.default_rng([seed, index]))


def with_hints(doubts: Sequence[Doubt]) -> list[Doubt]:
    """Add what is striking about the transcripts, compared with each other."""
    rates = [len(doubt.clip.text) / doubt.seconds for doubt in doubts if doubt.seconds > 0]
    median_rate = statistics.median(rates) if rates else 0.0
    return [dataclasses.replace(doubt, hint=_hint(doubt, median_rate)) for doubt in doubts]


def _hint(doubt: Doubt, median_rate: float) -> str:
    if doubt.empty:
        return "no word that counts"
    rate = len(doubt.clip.text) / doubt.seconds if doubt.seconds > 0 else 0.0
    if rate > _FAST * median_rate:
        return f"{rate:.0f} characters a second, usual are {median_rate:.0f}"
    return f"{rate:.1f} characters a second, usual are {median_rate:.0f}" if rate < _SLOW * median_rate else ""


def choose(doubts: Sequence[Doubt], bounds: Bounds, patches: Patches) -> list[Doubt]:
    """Return the samples to leave out, the worst first; what is protected is never among them.

    Raises:
        BadInput: they would be more than ``bounds.most`` of all.
    """
    chosen = [
        doubt
        for doubt in doubts
        if doubt.wrong(bounds) >= bounds.repeated and not patches.of("protect", SPLIT, doubt.clip.id)
    ]
    share = len(chosen) / max(1, len(doubts))
    if share > bounds.most:
        rates = statistics.median(doubt.wer for doubt in doubts)
        message = f"{len(chosen)} of {len(doubts)} samples ({share:.1%}) would be left out, more than {bounds.most:.1%}"
        hint = f"this suggests a model that has not learnt enough (its median WER here is {rates:.0%}) rather than at "
        raise BadInput(message, f"{hint}bad data: train on, or raise --margin or --most after checking some of them")
    return sorted(chosen, key=lambda doubt: (-doubt.wrong(bounds), -doubt.margin, doubt.clip.id))


def write_blacklist(dataset: str, text_column: str, chosen: Sequence[Doubt], bounds: Bounds) -> Path:
    """Write the samples to a patch file of their own, and return it.

    Raises:
        BadInput: the data set has no folder, or it cannot be written.
    """
    folder = read_tables(dataset, text_column).folder
    if folder is None:
        raise BadInput(f"{dataset}: a data set of the hub has no patches", "save it as a folder with train.csv")
    rows = list[tuple[object, ...]]()
    rows.append(("id", "split", "wer", "margin", "wrong", "listens", "seconds", "hint", "text", "heard"))
    for doubt in chosen:
        figures = (
            f"{doubt.wer:.3f}",
            f"{doubt.margin:.2f}",
            doubt.wrong(bounds),
            len(doubt.wers),
            f"{doubt.seconds:.2f}",
        )
        rows.append((doubt.clip.id, SPLIT, *figures, doubt.hint, doubt.clip.text, doubt.heard[0]))
    path = _free_name(folder / FOLDER / "delete")
    write_table(path, rows, option="")
    return path


def _free_name(folder: Path) -> Path:
    name = f"{BLACKLIST}{date.today().isoformat()}"
    path, number = folder / f"{name}.csv", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.csv"
    return path
