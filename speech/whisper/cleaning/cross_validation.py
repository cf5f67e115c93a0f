"""k-fold cross-validation of transcripts: every training sample is judged by a model that was not trained on it.

Out-of-sample predictions find label errors that a model trained on them would have memorised (Northcutt, Jiang, Chuang
2021, "Confident Learning: Estimating Uncertainty in Dataset Labels", section 3.1). A fold is an ordinary data set and
an ordinary run; the results of its samples are stored in a file, so that an interrupted command can be resumed, and
other bounds applied without training again.

::

    FOLDER/1-2/data/{train,validation}.csv   round 1, fold 2: training data, held-out data
    FOLDER/1-2/runs/                         its run, until the fold is judged
    FOLDER/1-2.json                          results of the held-out samples
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import BadInput, counted
from profiles.schema import Profile
from speech.data.speech_clips import Clip, FileSource
from speech.data.speech_dataset import read_with_validation
from speech.whisper.cleaning.blacklist import (
    SPLIT,
    ListeningPass,
    SuspectClip,
    judge_clips,
    merge_passes,
    with_hints,
)
from speech.whisper.task import NoUsableClips
from training.records.run_files import explain_errors, write_atomically
from training.tasks.base import Progress
from training.tasks.data_files.splits import id_hash
from training.tasks.data_files.tables import write_table

_EVALUATED = 8
"""Held-out samples that a fold's own run evaluates; the actual judgement follows it."""


@dataclass(frozen=True)
class Fold:
    """One fold of the samples, and the run that is trained on the others."""

    folder: Path
    held: tuple[Clip, ...]
    others: tuple[Clip, ...]

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def result(self) -> Path:
        return self.folder.with_suffix(".json")


def training_clips(profile: Profile) -> list[Clip]:
    """Return the profile's training samples with human transcripts.

    Raises:
        BadInput: the tables cannot be used, or recordings are not files.
    """
    data = profile.data
    clips = read_with_validation(data.dataset_path, data.text_column)[SPLIT][: data.max_train_samples or None]
    if not all(isinstance(clip.audio, FileSource) for clip in clips):
        raise BadInput(f"{data.dataset_path}: recordings of the hub", "save it as a folder with train.csv")
    return clips


def plan_folds(root: Path, profile: Profile, clips: Sequence[Clip], count: int, rounds: int) -> list[list[Fold]]:
    """Divide the samples ``rounds`` times into ``count`` folds of equal size, deterministically.

    Returns:
        The folds of each round. Their folder is named by a hash of everything that affects the result.

    Raises:
        BadInput: there are too few samples.
    """
    if len(clips) < 2 * count:
        fewer = len(clips) // 2
        hint = f"pass --folds {fewer} or less, or add samples" if fewer > 1 else "pass --folds 0: nothing is trained"
        raise BadInput(f"{counted(len(clips), 'sample')} cannot be divided into {count} folds", hint)
    folder = root / _key(profile, clips, count)
    planned = []
    for number in range(1, rounds + 1):
        ranked = sorted(clips, key=lambda clip: id_hash(f"{number} {clip.id}"))
        id_sets = [{clip.id for clip in ranked[start::count]} for start in range(count)]
        folds = []
        for index, ids in enumerate(id_sets, 1):
            held, others = (tuple(clip for clip in clips if (clip.id in ids) is is_held) for is_held in (True, False))
            folds.append(Fold(folder / f"{number}-{index}", held, others))
        planned.append(folds)
    return planned


def _key(profile: Profile, clips: Sequence[Clip], count: int) -> str:
    sections = profile.model_dump(mode="json", include={"model", "data", "training", "strategy"})
    lines = [(clip.id, clip.audio.stamp(), clip.text, clip.language) for clip in clips]
    return hashlib.blake2b(json.dumps([sections, lines, count]).encode(), digest_size=8).hexdigest()


def write_data(fold: Fold) -> None:
    """Write the tables of a fold, which refer to the original recordings.

    Raises:
        BadInput: they cannot be written.
    """
    for name, clips in (("train", fold.others), ("validation", fold.held)):
        rows = list[tuple[object, ...]]([("id", "audio_path", "text", "language")])
        for clip in clips:
            assert isinstance(clip.audio, FileSource)
            rows.append((clip.id, clip.audio.path.resolve(), clip.text, clip.language))
        write_table(fold.data / f"{name}.csv", rows, 0o600)


def profile_of(fold: Fold, profile: Profile, workers: int) -> Profile:
    """Return the profile of a fold's run: as many epochs as the profile's, and minimal evaluation."""
    share = len(fold.others) / (len(fold.held) + len(fold.others))
    changes: dict[str, dict[str, Any]] = {
        "model": {"lora_merge": True},
        "data": {
            "dataset_path": str(fold.data.resolve()),
            "text_column": "text",
            "pseudo_share": 0.0,
            "max_train_samples": 0,
            "max_eval_samples": _EVALUATED,
            "max_broken_share": 1.0,  # accepted for all samples; one fold may have more than its share
        },
        "training": {"max_steps": max(1, round(share * steps)) if (steps := profile.training.max_steps) else 0},
        "evaluation": {
            "eval_interval": 0,
            "eval_before": False,
            "eval_generate": False,
            "eval_local": "off",
            "early_stopping_patience": 0,
        },
        "run": {"output_dir": str(fold.runs), "hosts": "", "workers": workers, "shares": "", "trackers": ""},
    }
    sections = {name: getattr(profile, name).model_copy(update=change) for name, change in changes.items()}
    return profile.model_copy(update={**sections, "name": f"fold-{fold.folder.name}"})


def judge_fold(fold: Fold, profile: Profile, model: Path, device: str, batch_size: int, progress: Progress) -> None:
    """Judge a fold's held-out samples by the model of its run, store the results, and remove the run.

    Raises:
        BadInput: the model cannot be used, or the result cannot be written.
    """
    lenient = profile.model_copy(update={"data": profile.data.model_copy(update={"max_broken_share": 1.0})})
    try:
        suspects = judge_clips(lenient, list(fold.held), ListeningPass(model), device, batch_size, progress)
    except NoUsableClips:  # all held-out samples are broken
        suspects = []
    lines = [
        {
            "id": suspect.clip.id,
            "heard": suspect.heard,
            "wers": suspect.wers,
            "margins": suspect.margins,
            "seconds": suspect.seconds,
        }
        | {"empty": suspect.empty}
        for suspect in suspects
    ]
    with explain_errors(fold.result):
        write_atomically(fold.result, json.dumps(lines).encode(), 0o600)
        shutil.rmtree(fold.folder)


def read_results(planned: Sequence[Sequence[Fold]]) -> list[SuspectClip]:
    """Return the results of every sample, in each round by a model that was not trained on it.

    Raises:
        BadInput: a result is damaged.
    """
    rounds = [{suspect.clip.id: suspect for fold in folds for suspect in _read(fold)} for folds in planned]
    common = [clip for clip in rounds[0] if all(clip in suspects for suspects in rounds)]
    return with_hints([merge_passes([suspects[clip] for suspects in rounds]) for clip in common])


def _read(fold: Fold) -> list[SuspectClip]:
    clips = {clip.id: clip for clip in fold.held}
    try:
        lines = json.loads(fold.result.read_bytes())
        return [_suspect(clips[line["id"]], line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{fold.result}: not what was written here ({error})", "remove it, and repeat") from error


def _suspect(clip: Clip, line: Mapping[str, Any]) -> SuspectClip:
    wers, margins = (tuple(map(float, line[name])) for name in ("wers", "margins"))
    return SuspectClip(clip, tuple(map(str, line["heard"])), wers, margins, float(line["seconds"]), bool(line["empty"]))
