"""How many parameters a model has, from its files alone: no weights are loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 100_000_000


def parameters(model_path: str) -> int:
    """Return the number of parameters of a model's folder; 0 where the files do not tell (a hub name, for one)."""
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        return 0
    return _from_weights(folder) or _from_configuration(folder / "config.json")


def _from_weights(folder: Path) -> int:
    try:
        return sum(_tensors(path) for path in sorted(folder.glob("*.safetensors")))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return 0


def _tensors(path: Path) -> int:
    """Count what the header of a safetensors file lists."""
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _LONGEST_HEADER:
            raise ValueError(f"{path}: no safetensors file")
        header = json.loads(stream.read(size))
    return sum(prod(one["shape"]) for name, one in header.items() if name != "__metadata__")


def _from_configuration(path: Path) -> int:
    """Work the number out from a configuration: Whisper, and decoders of the GPT-2 and the Llama kind."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return _whisper(config) if "encoder_layers" in config else _decoder(config)
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def _whisper(config: Mapping[str, Any]) -> int:
    d = int(config["d_model"])
    ahead = 3 * d * int(config["num_mel_bins"]) + 3 * d * d
    places = d * (int(config["max_source_positions"]) + int(config["max_target_positions"]))
    encoder = int(config["encoder_layers"]) * (4 * d * d + 2 * d * int(config["encoder_ffn_dim"]))
    decoder = int(config["decoder_layers"]) * (8 * d * d + 2 * d * int(config["decoder_ffn_dim"]))
    return ahead + places + encoder + decoder + int(config["vocab_size"]) * d


def _decoder(config: Mapping[str, Any]) -> int:
    def first(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    d, layers = first("n_embd", "hidden_size"), first("n_layer", "num_hidden_layers")
    inner = first("n_inner", "intermediate_size") or 4 * d
    gated = 3 if "intermediate_size" in config else 2
    heads = first("num_attention_heads", "n_head") or 1
    keys = d * first("num_key_value_heads") // heads if config.get("num_key_value_heads") else d
    block = 2 * d * d + 2 * d * keys + gated * d * inner
    tied = bool(config.get("tie_word_embeddings", "n_embd" in config))
    return layers * block + first("vocab_size") * d * (1 if tied else 2) + first("n_positions") * d
