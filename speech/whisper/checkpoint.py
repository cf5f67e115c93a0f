"""Read a Whisper's files from a folder or the hub, and compose a Whisper of parts of others.

A student starts from its teacher's encoder and from decoder layers that are maximally spaced (Shleifer and Rush 2020,
arXiv 2010.13002, section 3.2; Gandhi et al. 2023, Distil-Whisper, arXiv 2311.00430, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.utils.hub import cached_file

from profiles.errors import BadInput
from profiles.locations import check_model_path
from training.tasks.pretrained import read_checked, read_weights

_WEIGHTS = (".safetensors", ".bin")
_ENCODER_FIELDS = (
    "encoder_layers",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "encoder_layerdrop",
    "num_mel_bins",
    "max_source_positions",
)
_ENCODER, _LAYERS = "model.encoder.", "model.decoder.layers."


def read_config(path: str) -> WhisperConfig:
    """Return the configuration of the model ``path``.

    Raises:
        BadInput: it is not found, or not a Whisper.
    """
    values: dict[str, Any] = read_checked(
        path, "model", lambda local: WhisperConfig.get_config_dict(path, local_files_only=local)[0]
    )
    kind = values.get("model_type")
    if kind != "whisper":
        raise BadInput(f"model {path} is of type {kind!r}, not whisper", "choose a Whisper, or another task")
    return read_checked(path, "model", lambda local: WhisperConfig.from_dict(values))


def files_of(path: str, adapter: str = "") -> list[Path]:
    """Return the files (weights and settings) of a model and its adapter, fetched from the hub if needed."""
    paths = [path, *([adapter] if adapter else [])]
    if not any(file.suffix in _WEIGHTS for file in _model_files(paths)):
        read_weights(WhisperForConditionalGeneration, path)
    return _model_files(paths)


def _model_files(paths: list[str]) -> list[Path]:
    return sorted(file for path in paths for file in _folder_of(path).iterdir() if file.suffix in {*_WEIGHTS, ".json"})


def _folder_of(path: str) -> Path:
    if check_model_path(path):
        return Path(path).expanduser()
    config_file = read_checked(path, "model", lambda local: cached_file(path, "config.json", local_files_only=local))
    return Path(str(config_file)).parent


def spaced_layers(layers: int, count: int) -> list[int]:
    """Return the indices of ``count`` of ``layers``, evenly spaced from the first to the last; of one, the last.

    Raises:
        BadInput: ``count`` is out of range.
    """
    if not 1 <= count <= layers:
        raise BadInput(f"student_layers = {count}, but the model's decoder has {layers} layers", f"set 1 to {layers}")
    if count == 1:
        return [layers - 1]
    return [round(index * (layers - 1) / (count - 1)) for index in range(count)]


def student_config(base: WhisperConfig, encoder: WhisperConfig | None, layers: Sequence[int]) -> WhisperConfig:
    """Return the configuration of ``base`` with another ``encoder`` and only some decoder ``layers``.

    Raises:
        BadInput: the encoder's width differs from that of the decoder, which attends to its output.
    """
    values = {**base.to_dict(), "decoder_layers": len(layers)}
    if encoder is not None:
        if encoder.d_model != base.d_model:
            message = f"encoder_path: that encoder is {encoder.d_model} wide, the model's decoder {base.d_model}"
            raise BadInput(message, "take models of equal width (d_model in their config.json)")
        values |= {name: getattr(encoder, name) for name in _ENCODER_FIELDS}
        values["num_hidden_layers"] = encoder.encoder_layers
    return WhisperConfig.from_dict(values)


def make_student(
    config: WhisperConfig, base: Any, encoder: Any | None, layers: Sequence[int]
) -> WhisperForConditionalGeneration:
    """Return a model of ``config`` with weights of ``base``, and of ``encoder`` if given.

    Args:
        base: ``WhisperForConditionalGeneration`` whose decoder layers ``layers`` are used, in this order.
        encoder: the model whose encoder is used; ``None``: that of ``base``.
    """
    weights = _with_layers(base.state_dict(), layers)
    if encoder is not None:
        weights = {name: value for name, value in weights.items() if not name.startswith(_ENCODER)}
        weights |= {name: value for name, value in encoder.state_dict().items() if name.startswith(_ENCODER)}
    with torch.device("meta"):
        student = WhisperForConditionalGeneration(config)
    student.load_state_dict({name: value.clone() for name, value in weights.items()}, strict=True, assign=True)
    student.tie_weights()
    student.name_or_path = base.name_or_path
    return student


def _with_layers(weights: Mapping[str, torch.Tensor], layers: Sequence[int]) -> dict[str, torch.Tensor]:
    selected = {name: value for name, value in weights.items() if not name.startswith(_LAYERS)}
    for new, old in enumerate(layers):
        prefix = f"{_LAYERS}{old}."
        selected |= {
            f"{_LAYERS}{new}.{name.removeprefix(prefix)}": value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
    return selected


def kept_alignment_heads(heads: Sequence[Sequence[int]], layers: Sequence[int]) -> list[list[int]]:
    """Return a model's alignment heads ``[layer, head]`` that a student also has, renumbered to its layers."""
    return [[layers.index(layer), head] for layer, head in heads if layer in layers]
