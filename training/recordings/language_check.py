"""The language check with a Whisper: the model's own detection on the first window of every clip."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import ModelSettings
from training.precision import select_device
from training.runs import find_model
from training.tasks.audio import decode
from training.tasks.speech_dataset import looks_like_path
from training.tasks.whisper_model import WhisperModelWrapper
from training.tasks.whisper_prompt import language_code


class ModelEar:
    """A multilingual Whisper that tells languages.

    Args:
        reference: model folder, run, profile or hub name.
        output: folder of the run folders.

    Raises:
        BadInput: the model cannot be found or used, or knows one language only.
    """

    def __init__(self, reference: str, output: Path, device: str = "auto") -> None:
        on_hub = reference.count("/") == 1 and not looks_like_path(reference) and not Path(reference).exists()
        folder = reference if on_hub else str(find_model(output, reference))
        self._wrapper = WhisperModelWrapper(ModelSettings(model_path=folder))
        if not self._wrapper.is_multilingual:
            raise BadInput(f"model {reference}: knows one language only", "languages are told by a multilingual model")
        self._device = select_device(device)
        self.name = f"{folder} {hashlib.blake2b(_stamp(Path(folder)).encode(), digest_size=8).hexdigest()}"

    @cached_property
    def _model(self) -> nn.Module:
        return self._wrapper.build().eval().to(self._device)

    @torch.no_grad()
    def languages(self, files: Sequence[Path]) -> list[str]:
        """Codes of the languages in the first window of sound files."""
        log_mel = self._wrapper.log_mel
        sounds = [decode(file, log_mel.rate, log_mel.seconds).samples for file in files]
        features = np.stack([log_mel.fill(*log_mel(samples)) for samples in sounds])
        heard = self._wrapper.hear(self._model, torch.from_numpy(features).to(self._device))
        return self._wrapper.detect_languages(self._model, heard)

    def code(self, language: str) -> str:
        """The model's code of a language; empty if none is given or the model does not know it."""
        try:
            code = language_code(language) if language else ""
        except BadInput:
            return ""
        return code if f"<|{code}|>" in self._wrapper.generation.lang_to_id else ""


def _stamp(folder: Path) -> str:
    """What changes when the weights do."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return " ".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
