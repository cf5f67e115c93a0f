"""What every exporter does: write a folder from a plain model, and listen with what it wrote; and the plainest one.

Three recordings, heard by the original and by the exported model, are the proof that an export is the same model. The
other exporters need packages of their own, so each is a module that is imported when it is asked for.
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
from training.export.formats import ModelSource
from training.tasks.audio import decode
from training.tasks.language_codes import language_code
from training.tasks.sound_file import AudioError, Samples
from training.tasks.speech_clips import Clip
from training.tasks.speech_dataset import clips_of_split, read_speech
from training.tasks.whisper.features import Features
from training.tasks.whisper.model import WhisperModelWrapper
from training.tasks.word_errors import count_errors, normalizer_for

CHECKED = 3
"""Recordings that are listened to."""


@dataclass(frozen=True)
class CheckClip:
    """One recording to listen to."""

    name: str
    samples: Samples
    """At the model's rate, at most its window."""
    language: str
    """Code; empty: the model decides."""


@dataclass(frozen=True)
class TranscriptPair:
    """What both models wrote down."""

    name: str
    original: str
    exported: str


@dataclass(frozen=True)
class CheckResult:
    """How far the exported model's texts are from those of the original."""

    heard: tuple[TranscriptPair, ...]
    differing: float
    """Words that differ, as a share of the words of the original (normalised as for WER)."""

    @property
    def same(self) -> int:
        """Recordings whose texts are the same letter by letter."""
        return sum(one.original == one.exported for one in self.heard)


def clips_to_check(source: ModelSource, wrapper: WhisperModelWrapper, files: Sequence[Path]) -> list[CheckClip]:
    """Return the recordings to listen to: ``files``, or some of the run's data that were held out of training.

    Raises:
        BadInput: a file cannot be read, or there is no data.
    """
    if files:
        return [_clip(wrapper, path.name, path, "") for path in files]
    found: list[CheckClip] = []
    clips = _held_out(source)
    for clip in clips[:: max(1, len(clips) // CHECKED)]:
        try:
            found.append(_clip(wrapper, clip.id, clip.audio.read(), clip.language))
        except (BadInput, OSError):  # a broken one among many: training leaves it out too
            continue
        if len(found) == CHECKED:
            break
    if not found:
        raise BadInput(f"none of the recordings of {source.dataset} can be read", "name some with --check-with FILE")
    return found


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


def longest_text(wrapper: WhisperModelWrapper) -> int:
    """Return the tokens that a text may take: half of the positions, as in the programs that read the formats."""
    return wrapper.max_positions // 2


def features(wrapper: WhisperModelWrapper, clip: CheckClip) -> Features:
    """Return the full window [mels, frames] of a clip."""
    return wrapper.log_mel.fill(*wrapper.log_mel(clip.samples))


@torch.no_grad()
def listen(wrapper: WhisperModelWrapper, model: Any, clips: Sequence[CheckClip]) -> tuple[list[str], list[CheckClip]]:
    """Return what a model of transformers writes down, and the clips with the languages that it heard."""
    batch = torch.from_numpy(np.stack([features(wrapper, clip) for clip in clips]))
    encoded = wrapper.hear(model, batch)
    languages = [clip.language for clip in clips]
    if not all(languages):
        languages = wrapper.detect_languages(model, encoded)
    said = wrapper.generate(model, encoded, languages, longest_text(wrapper))
    return [one.text for one in said], [replace(clip, language=code) for clip, code in zip(clips, languages)]


def compare(clips: Sequence[CheckClip], original: Sequence[str], exported: Sequence[str]) -> CheckResult:
    """Put the texts side by side, and count the words that differ."""
    heard = tuple(TranscriptPair(clip.name, *texts) for clip, *texts in zip(clips, original, exported))
    normal = [normalizer_for(clip.language) for clip in clips]
    references, others = ([spell(text) for spell, text in zip(normal, texts)] for texts in (original, exported))
    counts = count_errors(references, others)
    share = counts["word_edits"] / counts["words"] if counts["words"] else float(others != references)
    return CheckResult(heard, share)


@torch.no_grad()
def write_down(wrapper: WhisperModelWrapper, model: Any, hidden: torch.Tensor, language: str) -> str:
    """Return the text that a decoder of transformers makes of an encoder's output [1, positions, width]."""
    encoded = BaseModelOutput(last_hidden_state=hidden)
    return wrapper.generate(model, encoded, [language], longest_text(wrapper))[0].text


@dataclass(frozen=True)
class MergedWhisper:
    """A Whisper as transformers saves it, adapters merged: what a converter reads."""

    folder: Path
    wrapper: WhisperModelWrapper
    """Of this folder."""
    model: Any
    """``WhisperForConditionalGeneration`` on the CPU, in float32, for evaluation."""


class Encoder(nn.Module):
    """``input_features`` [batch, mels, frames] to the encoder's output [batch, positions, width]."""

    def __init__(self, whisper: Any) -> None:
        super().__init__()
        self.encoder = whisper.model.encoder

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(input_features).last_hidden_state
        return found


class Exporter(NamedTuple):
    """One format's two functions."""

    write: Callable[[MergedWhisper, Path, str], None]
    """``write(plain, folder, quantize)``: fill an empty folder. Raises ``BadInput`` where this model does not fit."""
    listen: Callable[[Path, MergedWhisper, Sequence[CheckClip]], list[str]]
    """``listen(folder, plain, clips)``: what the exported model writes down, by the format's own runtime."""


_TEXTS = (
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


def copy_texts(source: Path, folder: Path) -> None:
    """Copy what belongs to a model besides its weights: settings and tokenizer."""
    for name in _TEXTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_plain(plain: MergedWhisper, folder: Path, quantize: str) -> None:
    """Write a folder of transformers, in half precision if wanted."""
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(quantize)
    model = copy.deepcopy(plain.model).to(kind) if kind else plain.model
    plain.wrapper.save(model, folder)


def _listen_plain(folder: Path, plain: MergedWhisper, clips: Sequence[CheckClip]) -> list[str]:
    wrapper = WhisperModelWrapper(ModelSettings(model_path=str(folder), speech_task=plain.wrapper.settings.speech_task))
    return listen(wrapper, wrapper.build().eval(), clips)[0]


_MODULES = {"ctranslate2": "ctranslate2_model", "gguf": "ggml_model", "onnx": "onnx_model", "coreml": "coreml_model"}


def exporter_of(name: str) -> Exporter:
    """Return the functions of a format; only its own module is imported."""
    if name == "hf":
        return Exporter(_write_plain, _listen_plain)
    found: Exporter = importlib.import_module(f"training.export.{_MODULES[name]}").EXPORTER
    return found
