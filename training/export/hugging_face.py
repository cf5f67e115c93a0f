"""A plain folder of transformers, in half precision if wanted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from profiles.schema import ModelSettings
from training.export import check
from training.export.exporters import Exporter, Plain
from training.tasks.whisper_model import WhisperModelWrapper

_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _write(plain: Plain, folder: Path, quantize: str) -> None:
    kind = _TYPES.get(quantize)
    model = copy.deepcopy(plain.model).to(kind) if kind else plain.model
    plain.wrapper.save(model, folder, plain.wrapper.default_language)


def _listen(folder: Path, plain: Plain, clips: Sequence[check.CheckClip]) -> list[str]:
    wrapper = WhisperModelWrapper(ModelSettings(model_path=str(folder), speech_task=plain.wrapper.settings.speech_task))
    return check.listen(wrapper, wrapper.build().eval(), clips)[0]


EXPORTER = Exporter(_write, _listen)
