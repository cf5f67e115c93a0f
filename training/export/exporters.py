"""What every exporter does: write a folder from a plain model, and listen with what it wrote; and the plainest one.

The others need packages of their own, so each is a module that is imported when it is asked for.
"""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from profiles.schema import ModelSettings
from training.export.check import CheckClip, listen
from training.tasks.whisper.model import WhisperModelWrapper


@dataclass(frozen=True)
class Plain:
    """A Whisper as transformers saves it, adapters merged: what a converter reads."""

    folder: Path
    wrapper: WhisperModelWrapper
    """Of this folder."""
    model: Any
    """``WhisperForConditionalGeneration`` on the CPU, in float32, for evaluation."""


class Exporter(NamedTuple):
    """One format's two functions."""

    write: Callable[[Plain, Path, str], None]
    """``write(plain, folder, quantize)``: fill an empty folder. Raises ``BadInput`` where this model does not fit."""
    listen: Callable[[Path, Plain, Sequence[CheckClip]], list[str]]
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


def _write_plain(plain: Plain, folder: Path, quantize: str) -> None:
    """Write a folder of transformers, in half precision if wanted."""
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(quantize)
    model = copy.deepcopy(plain.model).to(kind) if kind else plain.model
    plain.wrapper.save(model, folder, plain.wrapper.default_language)


def _listen_plain(folder: Path, plain: Plain, clips: Sequence[CheckClip]) -> list[str]:
    wrapper = WhisperModelWrapper(ModelSettings(model_path=str(folder), speech_task=plain.wrapper.settings.speech_task))
    return listen(wrapper, wrapper.build().eval(), clips)[0]


_MODULES = {"ctranslate2": "ctranslate2_model", "gguf": "ggml_model", "onnx": "onnx_model", "coreml": "coreml_model"}


def exporter_of(name: str) -> Exporter:
    """Return the functions of a format; only its own module is imported."""
    if name == "hf":
        return Exporter(_write_plain, _listen_plain)
    found: Exporter = importlib.import_module(f"training.export.{_MODULES[name]}").EXPORTER
    return found
