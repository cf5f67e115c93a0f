"""The clips of one split with their features and tokens, as a map-style data set."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from training.tasks.features import FeatureStore
from training.tasks.speech_clips import Clip
from training.tasks.windows import Windows


@dataclass(frozen=True)
class SpeechSample:
    """One clip, ready for :meth:`training.tasks.whisper.WhisperTask.collate`."""

    features: npt.NDArray[np.float16]
    """[mels, frames that hold sound]"""
    silence: float
    """Value of the frames after them."""
    frames: int
    """Of the clip's window in training."""
    position: int
    """Of the clip in its feature store."""
    tokens: list[int]
    """Transcript with the end token, without the prompt."""
    text: str
    language: str
    """Code; empty: the task's default."""
    longest: int
    """Tokens of the longest transcript of its split, the end token included."""
    index: int
    """In its split."""


@dataclass(frozen=True)
class SpeechData:
    """Clips of one split that can be used."""

    clips: list[Clip]
    tokens: list[list[int]]
    store: FeatureStore
    positions: list[int]
    """Where in ``store`` each clip is."""
    languages: list[str]
    windows: Windows

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int, /) -> SpeechSample:
        text, language, frames = self.clips[index].text, self.languages[index], int(self.frames[index])
        position = self.positions[index]
        sound = self.store.sound(position)
        return SpeechSample(*sound, frames, position, self.tokens[index], text, language, self.longest, index)

    @cached_property
    def frames(self) -> npt.NDArray[np.int64]:
        """Frames of every clip's window in training."""
        return self.windows.frames(self.store.frames[self.positions])

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest transcript, the end token included."""
        return max(map(len, self.tokens))

    @property
    def hours(self) -> float:
        """Hours of audio."""
        return sum(self.store.seconds[position] for position in self.positions) / 3600
