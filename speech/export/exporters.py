"""The exporter interface (write a folder, transcribe with its runtime), the check of an export, and the hf exporter.

An export is verified by transcribing three recordings with the original and with the exported model. The other
exporters need packages of their own, so each is a module that is imported on demand.
"""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from profiles.errors import BadInput
from profiles.schema import ModelSettings
from speech.data.audio import decode
from speech.data.language_codes import language_code
from speech.data.sound_file import AudioError, Samples
from speech.data.speech_clips import Clip
from speech.data.speech_dataset import clips_of_split, read_speech
from speech.export.formats import ModelSource
from speech.scoring.word_errors import count_errors, normalizer_for
from speech.whisper.features import Features
from speech.whisper.model import WhisperModelWrapper

CHECK_CLIPS = 3
"""Number of recordings that are transcribed."""


@dataclass(frozen=True)
class CheckClip:
    """One recording to check an export with."""

    name: str
    samples: Samples
    """At the model's sample rate, truncated to its window."""
    language: str
    """Language code; empty: detected by the model."""


@dataclass(frozen=True)
class TranscriptPair:
    """Transcripts of one recording by both models."""

    name: str
    original: str
    exported: str


@dataclass(frozen=True)
class CheckResult:
    """How much the exported model's transcripts differ from the original's."""

    transcripts: tuple[TranscriptPair, ...]
    word_difference: float
    """Word edits as a share of the original's words (normalised as for WER)."""

    @property
    def identical(self) -> int:
        """Number of recordings with exactly equal transcripts."""
        return sum(pair.original == pair.exported for pair in self.transcripts)


def select_check_clips(source: ModelSource, wrapper: WhisperModelWrapper, files: Sequence[Path]) -> list[CheckClip]:
    """Return the recordings to check with: ``files``, or some of the run's held-out data.

    Raises:
        BadInput: a file cannot be read, or there is no data.
    """
    if files:
        return [_clip(wrapper, path.name, path, "") for path in files]
    readable: list[CheckClip] = []
    clips = _held_out(source)
    for clip in clips[:: max(1, len(clips) // CHECK_CLIPS)]:
        try:
            readable.append(_clip(wrapper, clip.id, clip.audio.read(), clip.language))
        except (BadInput, OSError):  # training leaves broken recordings out too
            continue
        if len(readable) == CHECK_CLIPS:
            break
    if not readable:
        raise BadInput(f"none of the recordings of {source.dataset} can be read", "name some with --check-with FILE")
    return readable


def _held_out(source: ModelSource) -> list[Clip]:
    hint = "name recordings with --check-with FILE, or pass --no-check"
    if not source.dataset:
        raise BadInput(f"there are no recordings to check the export of {source.folder} with", hint)
    try:
        splits = read_speech(source.dataset, source.text_column)
        name = "test" if "test" in splits else "validation"
        return splits.get(name) or clips_of_split(source.dataset, "validation", source.text_column)
    except BadInput as error:
        raise BadInput(f"no recordings to check the export with: {error.message}", hint) from error


def _clip(wrapper: WhisperModelWrapper, name: str, audio: Path | bytes, language: str) -> CheckClip:
    log_mel = wrapper.log_mel
    try:
        samples = decode(audio, log_mel.rate, log_mel.seconds).samples[: log_mel.n_samples]
    except AudioError as error:
        raise BadInput(f"{name}: {error}", "name other recordings with --check-with") from error
    code = language_code(language) if language and wrapper.is_multilingual else wrapper.default_language
    return CheckClip(name, samples, code)


def max_text_tokens(wrapper: WhisperModelWrapper) -> int:
    """Return the maximum number of tokens of a transcript: half of the positions, as in the formats' own runtimes."""
    return wrapper.max_positions // 2


def features(wrapper: WhisperModelWrapper, clip: CheckClip) -> Features:
    """Return the full window [mels, frames] of a clip."""
    return wrapper.log_mel.fill(*wrapper.log_mel(clip.samples))


@torch.no_grad()
def transcribe(
    wrapper: WhisperModelWrapper, model: Any, clips: Sequence[CheckClip]
) -> tuple[list[str], list[CheckClip]]:
    """Return the transcripts of a transformers model, and the clips with their detected languages filled in."""
    batch = torch.from_numpy(np.stack([features(wrapper, clip) for clip in clips]))
    encoded = wrapper.encode_audio(model, batch)
    languages = [clip.language for clip in clips]
    if not all(languages):
        languages = wrapper.detect_languages(model, encoded)
    transcripts = wrapper.generate(model, encoded, languages, max_text_tokens(wrapper))
    return [transcript.text for transcript in transcripts], [
        replace(clip, language=code) for clip, code in zip(clips, languages)
    ]


def compare(clips: Sequence[CheckClip], original: Sequence[str], exported: Sequence[str]) -> CheckResult:
    """Pair the transcripts of both models, and measure the word difference."""
    transcripts = tuple(TranscriptPair(clip.name, *texts) for clip, *texts in zip(clips, original, exported))
    normalizers = [normalizer_for(clip.language) for clip in clips]
    references, hypotheses = (
        [normalize(text) for normalize, text in zip(normalizers, texts)] for texts in (original, exported)
    )
    counts = count_errors(references, hypotheses)
    share = counts["word_edits"] / counts["words"] if counts["words"] else float(hypotheses != references)
    return CheckResult(transcripts, share)


@torch.no_grad()
def decode_hidden(wrapper: WhisperModelWrapper, model: Any, hidden: torch.Tensor, language: str) -> str:
    """Return the text that the transformers decoder generates for an encoder output [1, positions, width]."""
    encoded = BaseModelOutput(last_hidden_state=hidden)
    return wrapper.generate(model, encoded, [language], max_text_tokens(wrapper))[0].text


@dataclass(frozen=True)
class MergedWhisper:
    """A Whisper model in transformers' layout with adapters merged: the input of every converter."""

    folder: Path
    wrapper: WhisperModelWrapper
    """Wrapper of this folder."""
    model: Any
    """``WhisperForConditionalGeneration`` on the CPU, in float32, for evaluation."""


class Encoder(nn.Module):
    """Maps ``input_features`` [batch, mels, frames] to the encoder's output [batch, positions, width]."""

    def __init__(self, whisper: Any) -> None:
        super().__init__()
        self.encoder = whisper.model.encoder

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(input_features).last_hidden_state
        return hidden


class Exporter(NamedTuple):
    """The two functions of one format."""

    write: Callable[[MergedWhisper, Path, str], None]
    """``write(merged, folder, quantize)`` fills an empty folder; raises ``BadInput`` if the format cannot hold it."""
    transcribe: Callable[[Path, MergedWhisper, Sequence[CheckClip]], list[str]]
    """``transcribe(folder, merged, clips)`` returns the exported model's transcripts, by the format's own runtime."""


_SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "normalizer.json",
)


def copy_settings(source: Path, folder: Path) -> None:
    """Copy a model's settings and tokenizer files, everything but the weights."""
    for name in _SETTINGS_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_plain(merged: MergedWhisper, folder: Path, quantize: str) -> None:
    """Write a transformers folder, in half precision if ``quantize`` says so."""
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(quantize)
    model = copy.deepcopy(merged.model).to(dtype) if dtype else merged.model
    merged.wrapper.save(model, folder)


def _transcribe_plain(folder: Path, merged: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    wrapper = WhisperModelWrapper(
        ModelSettings(model_path=str(folder), speech_task=merged.wrapper.settings.speech_task)
    )
    return transcribe(wrapper, wrapper.build().eval(), clips)[0]


_MODULES = {"ctranslate2": "ctranslate2_model", "gguf": "ggml_model", "onnx": "onnx_model", "coreml": "coreml_model"}


def exporter_of(name: str) -> Exporter:
    """Return the exporter of a format, importing only its module."""
    if name == "hf":
        return Exporter(_write_plain, _transcribe_plain)
    exporter: Exporter = importlib.import_module(f"speech.export.{_MODULES[name]}").EXPORTER
    return exporter
