"""What can be said of a data set before anything that trains is loaded; whoever starts a run looks here first.

Whether it can be read, and what is longest in it, from which memory follows. Nothing is decoded: tables say how long a
clip is, else its file's header does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from profiles.errors import BadInput
from profiles.schema import DataSettings, Profile
from training.tasks.speech_clips import Clip, FileSource
from training.tasks.speech_dataset import is_on_hub, read_divided, read_speech

PATIENCE = 5.0
"""Seconds that headers are read for at most."""
_BYTES_A_TOKEN = 3
"""Of a text in UTF-8; 3 to 5 with the vocabularies of Whisper."""
_PROMPT = 6
"""Tokens before and after a text."""


def check_data(profile: Profile) -> None:
    """Read the tables of a profile's data set, and see whether its files are there; nothing is decoded.

    What is held out of the training clips is told.

    Raises:
        BadInput: it cannot be used; the message says what, where and what to do.
    """
    data = profile.data
    if profile.model.task == "custom" or is_on_hub(data.dataset_path):
        return
    if profile.model.task == "causal_lm":
        from training.tasks.conversations import conversation_files, read_conversations
        from training.tasks.texts import text_files  # loads numpy

        files = conversation_files(data.dataset_path)
        if files:
            read_conversations(files)
        else:
            text_files(data.dataset_path)
    else:
        read_divided(data.dataset_path, data.text_column, data.pseudo_share)


@dataclass(frozen=True)
class Longest:
    """What is longest among the samples."""

    seconds: float
    """Of sound."""
    tokens: int
    """Of a text with its prompt, estimated."""


def longest_clip(data: DataSettings) -> Longest | None:
    """Return what is longest among the training clips; ``None`` where it is not known: a data set on the hub, one that
    cannot be read, or so many files that nobody waits for their headers."""
    if not data.dataset_path or is_on_hub(data.dataset_path) or data.pseudo_share:
        return None
    path = Path(data.dataset_path).expanduser()
    try:
        files = [path] if path.is_file() else [*path.glob("*.csv"), *path.glob("*.jsonl")]
        stamp = max((file.stat().st_mtime_ns for file in files), default=0)
        return _longest(data.dataset_path, data.text_column, data.max_train_samples, stamp)
    except (BadInput, OSError):
        return None  # whoever reads the data set for training says why


@lru_cache(maxsize=8)
def _longest(path: str, text_column: str, limit: int, stamp: int) -> Longest | None:
    clips = read_speech(path, text_column).get("train", [])[: limit or None]
    seconds = _seconds(clips)
    if not clips or seconds is None:
        return None
    return Longest(seconds, max(len(clip.text.encode()) for clip in clips) // _BYTES_A_TOKEN + _PROMPT)


def _seconds(clips: Sequence[Clip]) -> float | None:
    longest, end = 0.0, time.monotonic() + PATIENCE
    for clip in clips:
        if time.monotonic() > end:
            return None
        found = clip.duration if clip.duration is not None else _of_file(clip)
        if found is None:
            return None
        longest = max(longest, found)
    return longest


def _of_file(clip: Clip) -> float | None:
    """Return the length that a file's header tells, 0 for a broken file: it is left out."""
    import soundfile  # 40 ms, which tables with a column for it do without

    if not isinstance(clip.audio, FileSource):
        return None
    try:
        return float(soundfile.info(str(clip.audio.path)).duration)
    except (RuntimeError, TypeError):
        return 0.0
