"""Reading a Whisper's configuration and weights from a folder, or from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.utils.hub import cached_file

from profiles.errors import BadInput
from training.tasks.hub import check_model_path, load

_WEIGHTS = (".safetensors", ".bin")


def read_config(path: str) -> WhisperConfig:
    """Return the configuration of the model ``path``.

    Raises:
        BadInput: it is not found, or no Whisper.
    """
    values: dict[str, Any] = load(
        path, "model", lambda local: WhisperConfig.get_config_dict(path, local_files_only=local)[0]
    )
    kind = values.get("model_type")
    if kind != "whisper":
        raise BadInput(f"model {path} is of type {kind!r}, not whisper", "choose a Whisper, or another task")
    return load(path, "model", lambda local: WhisperConfig.from_dict(values))


def read_weights(path: str) -> Any:
    """Return the ``WhisperForConditionalGeneration`` of ``path`` on the CPU, in float32.

    Raises:
        BadInput: its weights are not found, damaged or incomplete.
    """

    def read(local: bool) -> Any:
        whisper: Any = WhisperForConditionalGeneration
        model, info = whisper.from_pretrained(
            path, local_files_only=local, dtype=torch.float32, output_loading_info=True
        )
        missing = sorted(info["missing_keys"])
        if missing:
            raise BadInput(
                f"model {path}: its weights lack {missing[0]} and {len(missing) - 1} more",
                "name the folder of a complete model, or set from_scratch",
            )
        return model

    return load(path, "model", read)


def files_of(path: str, adapter: str = "") -> list[Path]:
    """Return the files of a model and its adapter, weights and settings; a hub's are fetched if they are not here."""
    paths = [path, *([adapter] if adapter else [])]
    if not any(file.suffix in _WEIGHTS for file in _there(paths)):
        read_weights(path)
    return _there(paths)


def _there(paths: list[str]) -> list[Path]:
    return sorted(file for path in paths for file in _folder_of(path).iterdir() if file.suffix in {*_WEIGHTS, ".json"})


def _folder_of(path: str) -> Path:
    if check_model_path(path):
        return Path(path).expanduser()
    found = load(path, "model", lambda local: cached_file(path, "config.json", local_files_only=local))
    return Path(str(found)).parent
