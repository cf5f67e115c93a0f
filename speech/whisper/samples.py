"""The samples of a split: clips with their tokens and cached, memory-mapped features; and language detection.

Features are stored up to the end of the audio: the silence that fills the model's window is one constant, so a clip of
2 s takes 32 kB instead of the 480 kB of a full window of 30 s (80 mels, float16).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from profiles.errors import BadInput, counted
from speech.data.audio import as_mp3, decode
from speech.data.language_codes import language_code
from speech.data.sound_file import AudioError
from speech.data.speech_clips import AudioSource, Clip
from speech.whisper.decoding import Transcriber
from speech.whisper.features import Features, LogMel, Windows, augment, fill_row
from speech.whisper.model import WhisperModelWrapper
from training.hardware.device import release_memory
from training.hardware.resources import whole_cores
from training.records.model_folders import find_usable_model
from training.tasks.base import Progress
from training.tasks.cache import digest, get_or_build, key_of_contents, key_of_files

_WINDOW_SECONDS = 30.0  # seconds of Whisper's window
_SLICE = 256  # clips submitted to the threads at once, which bounds the memory of results waiting to be written


@dataclass(frozen=True)
class SpeechSample:
    """One clip, ready for :meth:`speech.whisper.task.WhisperTask.collate`."""

    features: npt.NDArray[np.float16]
    """[mels, frames with audio]"""
    silence: float
    """Value of the frames after them."""
    frames: int
    """Length of the clip's window in training."""
    position: int
    """Index of the clip in its feature store."""
    tokens: list[int]
    """Transcript with the end token, without the prompt."""
    text: str
    language: str
    """Language code; empty: the task's default."""
    longest: int
    """Tokens of the longest transcript of its split, including the end token."""
    index: int
    """Index in its split."""


def window_batch(
    samples: Sequence[SpeechSample], log_mel: LogMel, strength: float, rngs: Sequence[np.random.Generator] | None
) -> torch.Tensor:
    """Return windows [batch, mels, frames] padded to the longest one: in training (with generators) shortened as
    configured, and augmented within their own length; in evaluation full windows.

    Args:
        strength: of the augmentation; 0: none.
    """
    frames = [log_mel.frames if rngs is None else sample.frames for sample in samples]
    batch = np.empty((len(samples), log_mel.mels, max(frames)), dtype=np.float32)
    for index, (sample, length) in enumerate(zip(samples, frames, strict=True)):
        features: npt.NDArray[Any] = sample.features
        if rngs is not None and strength:
            features = augment(log_mel.fill(features, sample.silence, length), strength, rngs[index])
        fill_row(batch[index], features, sample.silence)
    return torch.from_numpy(batch)


@dataclass(frozen=True)
class SpeechData:
    """The usable clips of one split."""

    clips: list[Clip]
    tokens: list[list[int]]
    store: FeatureStore
    positions: list[int]
    """Index of each clip in ``store``."""
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
        """Window lengths of all clips in training, in frames."""
        return self.windows.frames(self.store.frames[self.positions])

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest transcript, including the end token."""
        return max(map(len, self.tokens))

    def sound(self, index: int) -> bytes | str:
        """Return the part of a clip that the model hears as MP3, or the error."""
        try:
            return as_mp3(self.clips[index].audio.read(), _WINDOW_SECONDS)
        except (AudioError, OSError) as error:
            return str(error)

    @property
    def hours(self) -> float:
        """Hours of audio."""
        return sum(self.store.seconds[position] for position in self.positions) / 3600


class FeatureStore:
    """Features of many clips in one memory-mapped float16 array."""

    def __init__(self, folder: Path, log_mel: LogMel) -> None:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self._log_mel = log_mel
        self.key = folder.name
        """Hash of the recordings and the extractor's settings."""
        self._ends = np.concatenate([[0], np.cumsum(index["frames"])]).astype(np.int64)
        self._silence: list[float] = index["silence"]
        self.seconds: list[float] = index["seconds"]
        """Length of each whole recording; 0 for a broken one."""
        self.errors: dict[int, str] = {int(i): text for i, text in index["errors"].items()}
        """Errors of broken recordings by position."""
        total = int(self._ends[-1])
        shape = (total, log_mel.mels)
        self._data: npt.NDArray[np.float16] = (
            np.memmap(folder / "features.f16", np.float16, "r", shape=shape) if total else np.empty(shape, np.float16)
        )

    def __len__(self) -> int:
        return len(self._silence)

    @property
    def frames(self) -> npt.NDArray[np.int64]:
        """Number of frames with audio of every clip."""
        return np.diff(self._ends)

    def sound(self, position: int) -> tuple[npt.NDArray[np.float16], float]:
        """Return the stored features of a clip [mels, frames with audio], and the value of the silence after them."""
        return self._data[self._ends[position] : self._ends[position + 1]].T, self._silence[position]

    def __getitem__(self, position: int) -> Features:
        """Return the full window [mels, frames] of a clip."""
        return self._log_mel.fill(*self.sound(position))


def open_features(
    sources: Sequence[AudioSource],
    log_mel: LogMel,
    root: Path,
    workers: int = 0,
    progress: Progress = lambda phase, done, total: None,
    phase: str = "features",
) -> FeatureStore:
    """Return the features of ``sources`` from the cache below ``root``, computing them if needed.

    The cache is keyed by the files' contents and the extractor's settings. As hashing all files of a large data set at
    every start would take long, a second entry maps the files' sizes and mtimes to that key.

    Args:
        workers: threads; 0: one per core. Decoding, resampling and the transform release the GIL.

    Raises:
        BadInput: the cache folder cannot be used.
    """
    threads = workers or whole_cores()
    settings = log_mel.fingerprint()

    def waiting() -> None:
        progress(f"waiting for another worker: {phase}", 0, len(sources))

    def contents() -> list[str]:
        with ThreadPoolExecutor(threads) as pool:
            return [settings, *pool.map(_content_hash, sources)]

    key = key_of_contents(root, [settings, *(source.stamp() for source in sources)], contents, waiting)
    build = partial(_write, sources, log_mel, threads, lambda done: progress(phase, done, len(sources)))
    return FeatureStore(get_or_build(root / "features", key, build, waiting), log_mel)


@dataclass(frozen=True)
class _Computed:
    frames: npt.NDArray[np.float16]
    silence: float = 0.0
    seconds: float = 0.0
    error: str = ""


def _compute(source: AudioSource, log_mel: LogMel) -> _Computed:
    try:
        audio = decode(source.read(), log_mel.rate, log_mel.seconds)
    except (AudioError, OSError) as error:
        return _Computed(np.empty((0, log_mel.mels), np.float16), error=str(error))
    features, silence = log_mel(audio.samples)
    # Rounded like the stored frames, so that silence inside the clip and after it has one value.
    return _Computed(np.ascontiguousarray(features.T, dtype=np.float16), float(np.float16(silence)), audio.seconds)


def _write(
    sources: Sequence[AudioSource], log_mel: LogMel, threads: int, report: Callable[[int], None], folder: Path
) -> None:
    frames, silence, seconds, errors = [], [], [], {}
    report(0)
    with (folder / "features.f16").open("wb") as file, ThreadPoolExecutor(threads) as pool:
        slices = (sources[start : start + _SLICE] for start in range(0, len(sources), _SLICE))
        computed = (clip for batch in slices for clip in pool.map(partial(_compute, log_mel=log_mel), batch))
        for position, clip in enumerate(computed):
            file.write(clip.frames.tobytes())
            frames.append(len(clip.frames))
            silence.append(clip.silence)
            seconds.append(clip.seconds)
            if clip.error:
                errors[position] = clip.error
            report(position + 1)
    index = {"frames": frames, "silence": silence, "seconds": seconds, "errors": errors}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def _content_hash(source: AudioSource) -> str:
    try:
        return hashlib.blake2b(source.read(), digest_size=16).hexdigest()
    except OSError as error:
        return f"unreadable {error}"


logger = logging.getLogger("muster.data")

_BATCH = 8  # clips per batch of language detection


def detect_clip_languages(
    wrapper: WhisperModelWrapper,
    store: FeatureStore,
    positions: Sequence[int],
    device: torch.device,
    root: Path,
    progress: Progress,
) -> list[str]:
    """Return the language codes that a model detects in clips, cached below ``root``.

    Args:
        positions: indices of the clips in ``store``.

    Raises:
        BadInput: the model is untrained, or cannot be read.
    """
    if not wrapper.is_multilingual:
        return ["en"] * len(positions)
    if wrapper.settings.from_scratch:
        raise BadInput("a model from scratch cannot tell the language", "set language, or add a column 'language'")

    @torch.no_grad()
    def listen(folder: Path) -> None:
        model, codes = wrapper.build().eval().to(device), list[str]()
        for start in range(0, len(positions), _BATCH):
            progress("languages", start, len(positions))
            clips = [torch.from_numpy(store[position]) for position in positions[start : start + _BATCH]]
            codes += wrapper.detect_languages(model, wrapper.encode_audio(model, torch.stack(clips).to(device)))
        progress("languages", len(positions), len(positions))
        del model
        release_memory(device)
        (folder / "languages.json").write_text(json.dumps(codes), encoding="utf-8")

    key = digest([key_of_files(root, wrapper.files()), store.key, json.dumps(list(positions))])
    heard: list[str] = json.loads((get_or_build(root / "languages", key, listen) / "languages.json").read_text("utf-8"))
    counts = ", ".join(f"{code} in {count}" for code, count in Counter(heard).most_common())
    logger.warning("language = auto: of %s without a language the model hears %s", counted(len(heard), "clip"), counts)
    return heard


class LanguageDetector(Transcriber):
    """Detects languages with a multilingual Whisper.

    Args:
        reference: model folder, run, profile or hub name.
        output: folder of the run folders.

    Raises:
        BadInput: the model cannot be found or used, or is not multilingual.
    """

    def __init__(self, reference: str, output: Path, device: str = "auto") -> None:
        folder = str(find_usable_model(output, reference))
        super().__init__(folder, device)
        if not self.wrapper.is_multilingual:
            raise BadInput(f"model {reference}: knows one language only", "languages are told by a multilingual model")
        files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
        stamp = " ".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
        self.name = f"{folder} {hashlib.blake2b(stamp.encode(), digest_size=8).hexdigest()}"
        """Key of its cached answers, which changes with the weights."""

    @torch.no_grad()
    def languages(self, files: Sequence[Path]) -> list[str]:
        """Return the language codes of audio files, from their first window."""
        log_mel = self.wrapper.log_mel
        sounds = [decode(file, log_mel.rate, log_mel.seconds).samples for file in files]
        return self.wrapper.detect_languages(self.model, self.encode(sounds))

    def code(self, language: str) -> str:
        """Return the model's code of a language; empty if none is given or the model does not support it."""
        try:
            code = language_code(language) if language else ""
        except BadInput:
            return ""
        return code if code in self.wrapper.languages else ""
