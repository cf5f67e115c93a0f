"""What every exporter does: write a folder from a plain model, and listen with what it wrote."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from training.export.check import CheckClip
from training.tasks.whisper_model import WhisperModelWrapper


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


_MODULES = {
    "hf": "hugging_face",
    "ctranslate2": "ctranslate2_model",
    "gguf": "ggml_model",
    "onnx": "onnx_model",
    "coreml": "coreml_model",
}


def exporter_of(name: str) -> Exporter:
    """Return the functions of a format; only its own module is imported."""
    found: Exporter = importlib.import_module(f"training.export.{_MODULES[name]}").EXPORTER
    return found
