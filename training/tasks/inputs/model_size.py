"""Size of a model from the files of its folder, without loading it."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 100_000_000
_GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "smollm3")
"""Model types whose MLP has three matrices, and no biases."""


@dataclass(frozen=True)
class ModelSize:
    """The properties of a model that its memory depends on, as counts of numbers."""

    parameters: int
    layers: int = 12
    activations: int = 0
    """Activations of one sample saved for backward; 0: unknown. For Whisper with a full window."""
    encoder: int = 0
    """Parameters of an encoder that can be frozen."""
    encoder_activations: int = 0
    """Part of ``activations`` in that encoder; none if it is frozen."""
    outputs: int = 0
    """Part of ``activations`` outside of the blocks, the logits and probabilities: checkpointing does not save them."""
    working: int = 0
    """Temporary activations of one sample in the encoder, needed even if nothing is saved for backward."""
    evaluation: int = 0
    """Activations of one sample in an evaluation; nothing is saved for backward. For Whisper with a full window."""
    matrices: int = 0
    """Parameters in linear layers, which can be held in 8 bits."""
    teacher: ModelSize | None = None
    """Size of the teacher in a distillation."""


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def _elements(path: Path) -> int:
    """Return how many numbers a safetensors file holds, from its header; 0 if that cannot be read."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= _LONGEST_HEADER else {}
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        return sum(math.prod(int(side) for side in shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return 0


def integer_in(config: Mapping[str, Any], *names: str) -> int:
    """Return the first entry of a configuration that is a whole number above 0.

    Raises:
        KeyError: there is none.
    """
    for name in names:
        if isinstance(config.get(name), int) and 0 < config[name] < 2**40:
            return int(config[name])
    raise KeyError(names[0])


def decoder_size(config: Mapping[str, Any], sequence: int = 0) -> ModelSize:
    """Return the size of a decoder like GPT-2, or like Llama (gated MLP of three matrices, grouped keys and values).

    Args:
        sequence: tokens of one text; 0: the model's maximum.
    """
    width, layers = (
        integer_in(config, "hidden_size", "n_embd"),
        integer_in(config, "num_hidden_layers", "n_layer"),
    )
    vocabulary, gated = integer_in(config, "vocab_size"), config.get("model_type") in _GATED
    wide = integer_in({"wide": 4 * width, **config}, "intermediate_size", "n_inner", "wide")
    heads = integer_in({"heads": 1, **config}, "num_attention_heads", "n_head", "heads")
    groups = integer_in({"heads": heads, **config}, "num_key_value_heads", "heads")
    head = integer_in({"head": max(1, width // heads), **config}, "head_dim", "head")
    attention = 2 * width * heads * head + 2 * width * groups * head
    mlp_parameters = (3 if gated else 2) * width * wide
    small_parameters = 2 * width if gated else 4 * width + 4 * width + wide + width  # norms, and biases
    position_parameters = (
        0 if gated else integer_in({"places": 1, **config}, "n_positions", "max_position_embeddings", "places") * width
    )
    tied = config.get("tie_word_embeddings", not gated)
    total = (
        vocabulary * width * (1 if tied else 2)
        + position_parameters
        + layers * (attention + mlp_parameters + small_parameters)
        + 2 * width
    )
    length = sequence or integer_in({"length": 512, **config}, "n_positions", "max_position_embeddings", "length")
    activations = length * (saved_activations(width, wide) * layers + 2 * vocabulary)
    matrices = (
        layers * (attention + mlp_parameters) if config.get("model_type") != "gpt2" else 0
    )  # whose layers are no Linear
    outputs = length * 2 * vocabulary
    evaluation = outputs + length * working_activations(width, wide)
    return ModelSize(total, layers, activations, outputs=outputs, evaluation=evaluation, matrices=matrices)


def saved_activations(width: int, wide: int) -> int:
    """Return the activations of one token that a block saves for backward, without the attention matrix, which is
    recomputed (Korthikanti et al. 2022, arXiv 2205.05198, section 4: 34 sbh in bytes of 16-bit numbers)."""
    return 9 * width + 2 * wide


def working_activations(width: int, wide: int) -> int:
    """Return the activations of one token that a block holds at once if nothing is saved: residual stream and MLP."""
    return 3 * width + wide


def size_of(
    folder: Path, shape: Callable[[Mapping[str, Any]], ModelSize] = decoder_size, is_whole: bool = True
) -> ModelSize | None:
    """Return the size of the model in a folder; ``None`` if neither its weights nor its configuration show it.

    Args:
        shape: returns the size of a model with a configuration; raises ``KeyError``, ``TypeError`` or ``ValueError``
            if it describes none.
        is_whole: whether all weights in the folder are trained, so that they can be counted.
    """
    config = {**_read(folder / "preprocessor_config.json"), **_read(folder / "config.json")}
    size: ModelSize | None = None
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        size = shape(config)
    parameters = sum(_elements(path) for path in folder.glob("*.safetensors")) if is_whole else 0
    if parameters and size is not None:
        return replace(size, parameters=parameters)
    return ModelSize(parameters) if parameters else size
