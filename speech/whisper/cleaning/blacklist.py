"""Find samples with suspicious transcripts: a model hears something else, and finds the transcript far less probable.

The model should not have been trained on the sample (:mod:`speech.whisper.cleaning.cross_validation`); one
that was has memorised many wrong transcripts.
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
from profiles.quantities import error_rate_text, share_text
from profiles.schema import ModelSettings, Profile
from speech.data.patches import BLACKLIST, FOLDER, Patches
from speech.data.speech_clips import Clip
from speech.data.speech_dataset import read_tables, read_with_validation
from speech.scoring.word_errors import ErrorRates
from speech.whisper.decoding import DecodingResult, generation_bound, transcribe_clips
from speech.whisper.features import NOISE, augment
from speech.whisper.samples import SpeechData
from speech.whisper.task import WhisperTask
from training.hardware.device import select_device
from training.tasks.base import Progress
from training.tasks.data_files.tables import write_table

SPLIT = "train"
_FAST, _SLOW = 3.0, 1 / 3
"""Characters per second, as multiples of the median, beyond which a transcript hardly fits its recording."""


@dataclass(frozen=True)
class ListeningPass:
    """One transcription of all clips."""

    model: Path
    seed: int | None = None
    """Seed of the audio augmentation; ``None``: no augmentation."""


@dataclass(frozen=True)
class SuspectClip:
    """A clip with the results of all passes."""

    clip: Clip
    heard: tuple[str, ...]
    """Transcript in each pass."""
    wers: tuple[float, ...]
    margins: tuple[float, ...]
    """Mean log probability per token of the model's text minus that of the transcript, in nats, in each pass."""
    seconds: float
    empty: bool
    """Whether the normalised transcript is empty."""
    hint: str = ""
    """Remark on an unusual transcript."""

    @property
    def wer(self) -> float:
        """Median over the passes."""
        return statistics.median(self.wers)

    @property
    def margin(self) -> float:
        """Median over the passes, in nats."""
        return statistics.median(self.margins)

    def failed_passes(self, bounds: Bounds) -> int:
        """Return the number of passes that reach both bounds."""
        pairs = zip(self.wers, self.margins, strict=True)
        return sum(wer >= bounds.wer and margin >= bounds.margin for wer, margin in pairs)


@dataclass(frozen=True)
class Bounds:
    """Thresholds for putting a sample on the list."""

    wer: float = 0.5
    margin: float = 2.0
    """Nats; see :attr:`SuspectClip.margins`."""
    repeated: int = 1
    """Minimum number of passes that reach both bounds."""
    most: float = 0.1
    """Maximum share of the samples that may be listed."""


def plan_passes(models: Sequence[Path], count: int) -> list[ListeningPass]:
    """Return ``count`` passes: each model once with the original audio, then the first with augmented audio."""
    plain = [ListeningPass(model) for model in models[:count]]
    return plain + [ListeningPass(models[0], seed) for seed in range(count - len(plain))]


def find_suspects(
    profile: Profile, passes: Sequence[ListeningPass], device: str, batch_size: int, progress: Progress
) -> list[SuspectClip]:
    """Transcribe the training samples of ``profile`` (with patches applied) in all passes.

    Raises:
        BadInput: a model or the data cannot be used.
    """
    data = profile.data
    clips = read_with_validation(data.dataset_path, data.text_column)[SPLIT][: data.max_train_samples or None]
    results_by_pass = [
        judge_clips(profile, clips, listening_pass, device, batch_size, progress) for listening_pass in passes
    ]
    return with_hints([merge_passes(suspects) for suspects in zip(*results_by_pass, strict=True)])


def judge_clips(
    profile: Profile, clips: list[Clip], listening_pass: ListeningPass, device: str, batch_size: int, progress: Progress
) -> list[SuspectClip]:
    """Transcribe clips in one pass; unreadable ones are left out."""
    settings = ModelSettings(model_path=str(listening_pass.model), language=profile.model.language)
    task = WhisperTask(profile.model_copy(update={"model": settings}))
    data = task.prepare_split(SPLIT, clips, progress)
    model = task.wrapper.build()
    task.ensure_language(model, data)
    model = model.to(select_device(device))
    languages = [language or task.default_language for language in data.languages]
    bound = generation_bound(data.longest, profile.evaluation.eval_max_new_tokens, task.wrapper.text_positions)
    phase = f"listening with {listening_pass.model}" + ("" if listening_pass.seed is None else ", noisy")
    rates, suspects = ErrorRates(), list[SuspectClip]()
    for start in range(0, len(data), batch_size):
        indices = range(start, min(start + batch_size, len(data)))
        batch = np.stack([_features(data, index, listening_pass.seed) for index in indices])
        features = torch.from_numpy(batch).to(next(model.parameters()).device)
        texts = [data.clips[index].text for index in indices]
        results = transcribe_clips(task.wrapper, model, features, [languages[index] for index in indices], bound, texts)
        suspects += [_suspect(data, index, result, rates, languages[index]) for index, result in zip(indices, results)]
        progress(phase, len(suspects), len(data))
    return suspects


def _suspect(data: SpeechData, index: int, result: DecodingResult, rates: ErrorRates, language: str) -> SuspectClip:
    clip, transcript_confidence = data.clips[index], result.reference_confidence
    wer = rates.of(clip.text, result.text, language)
    margin = 0.0 if transcript_confidence is None else result.confidence - transcript_confidence
    empty = not rates.normalised(clip.text, language).strip()
    return SuspectClip(clip, (result.text,), (wer,), (margin,), data.store.seconds[data.positions[index]], empty)


def merge_passes(suspects: Sequence[SuspectClip]) -> SuspectClip:
    """Merge the results of several passes over one clip."""
    texts, wers, margins = zip(
        *((suspect.heard[0], suspect.wers[0], suspect.margins[0]) for suspect in suspects), strict=True
    )
    return dataclasses.replace(suspects[0], heard=texts, wers=wers, margins=margins)


def _features(data: SpeechData, index: int, seed: int | None) -> np.ndarray:
    features = data.store[data.positions[index]]
    return features if seed is None else augment(features, NOISE, np.random.default_rng([seed, index]))


def with_hints(suspects: Sequence[SuspectClip]) -> list[SuspectClip]:
    """Add hints about unusual transcripts, compared with the others."""
    rates = [len(suspect.clip.text) / suspect.seconds for suspect in suspects if suspect.seconds > 0]
    median_rate = statistics.median(rates) if rates else 0.0
    return [dataclasses.replace(suspect, hint=_hint(suspect, median_rate)) for suspect in suspects]


def _hint(suspect: SuspectClip, median_rate: float) -> str:
    if suspect.empty:
        return "no word that counts"
    rate = len(suspect.clip.text) / suspect.seconds if suspect.seconds > 0 else 0.0
    if rate > _FAST * median_rate:
        return f"{rate:.0f} characters a second, usual are {median_rate:.0f}"
    return f"{rate:.1f} characters a second, usual are {median_rate:.0f}" if rate < _SLOW * median_rate else ""


def choose(suspects: Sequence[SuspectClip], bounds: Bounds, patches: Patches) -> list[SuspectClip]:
    """Return the samples to leave out, worst first, except protected ones.

    Raises:
        BadInput: their share exceeds ``bounds.most``.
    """
    chosen = [
        suspect
        for suspect in suspects
        if suspect.failed_passes(bounds) >= bounds.repeated and not patches.of("protect", SPLIT, suspect.clip.id)
    ]
    share = len(chosen) / max(1, len(suspects))
    if share > bounds.most:
        rates = statistics.median(suspect.wer for suspect in suspects)
        chosen_share = f"{len(chosen)} of {len(suspects)} samples ({share_text(share)})"
        message = f"{chosen_share} would be left out, more than {share_text(bounds.most)}"
        cause = f"a model that has not learnt enough (its median WER here is {error_rate_text(rates)})"
        hint = "rather than bad data: train on, or raise --margin or --most after checking some of them"
        raise BadInput(message, f"this suggests {cause} {hint}")
    return sorted(chosen, key=lambda suspect: (-suspect.failed_passes(bounds), -suspect.margin, suspect.clip.id))


def write_blacklist(dataset: str, text_column: str, chosen: Sequence[SuspectClip], bounds: Bounds) -> Path:
    """Write the samples to a new patch file, and return its path.

    Raises:
        BadInput: the data set has no folder, or the file cannot be written.
    """
    folder = read_tables(dataset, text_column).folder
    if folder is None:
        raise BadInput(f"{dataset}: a data set of the hub has no patches", "save it as a folder with train.csv")
    rows = list[tuple[object, ...]]()
    rows.append(("id", "split", "wer", "margin", "wrong", "listens", "seconds", "hint", "text", "heard"))
    for suspect in chosen:
        figures = (
            f"{suspect.wer:.3f}",
            f"{suspect.margin:.2f}",
            suspect.failed_passes(bounds),
            len(suspect.wers),
            f"{suspect.seconds:.2f}",
        )
        rows.append((suspect.clip.id, SPLIT, *figures, suspect.hint, suspect.clip.text, suspect.heard[0]))
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
