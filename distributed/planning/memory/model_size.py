"""Size of a model from the files of its folder, without loading it."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiles.schema import Profile
from training.tasks.published_models import model_folder
from training.workers.data_findings import Longest, longest_clip

_LONGEST_HEADER = 100_000_000
_WINDOW_SECONDS = 30
"""Window of a Whisper whose feature extractor does not state it."""
_CROSS_ATTENTION_WIDTHS = 6
"""Activations of cross-attention saved per token, in widths: input, norm, query, outputs."""
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


def size_for(profile: Profile) -> ModelSize | None:
    """Return the size of a profile's model from files on this machine; ``None`` if they are missing, or for a custom
    job."""
    model = profile.model
    folder = model_folder(model.model_path) if model.trait != "own code" else None
    length = profile.data.block_size if model.trait == "texts" else 0
    longest = longest_clip(profile.data) if model.trait == "speech" and folder is not None else None
    window = "full" if model.from_scratch and profile.data.window == "auto" else profile.data.window
    bounds = SampleBounds(window, longest) if longest is not None else None
    size = size_of(folder, length, model.student_layers, bounds) if folder is not None else None
    teacher = model_folder(model.teacher_path) if model.teacher_path else None
    return replace(size, teacher=size_of(teacher)) if size is not None and teacher is not None else size


@dataclass(frozen=True)
class SampleBounds:
    """Largest sample of a speech training."""

    window: str
    longest: Longest


def size_of(
    folder: Path, sequence: int = 0, decoder_layers: int = 0, bounds: SampleBounds | None = None
) -> ModelSize | None:
    """Return the size of the model in a folder; ``None`` if neither its weights nor its configuration show it.

    Args:
        sequence: tokens of one text; 0: the model's maximum.
        decoder_layers: decoder layers of a student of this Whisper; 0: all.
        bounds: largest sample of a Whisper's training; ``None``: full windows, and texts of the maximal length.
    """
    config, features_config = _read(folder / "config.json"), _read(folder / "preprocessor_config.json")
    if decoder_layers:
        config["decoder_layers"] = decoder_layers
    try:
        shape = (
            _whisper({**features_config, **config}, bounds)
            if config.get("model_type") == "whisper"
            else _decoder(config, sequence)
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        shape = None
    parameters = 0 if decoder_layers else sum(_elements(path) for path in folder.glob("*.safetensors"))
    if parameters and shape is not None:
        return replace(shape, parameters=parameters)
    return ModelSize(parameters) if parameters else shape


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


def _integer(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and 0 < config[name] < 2**40:
            return int(config[name])
    raise KeyError(names[0])


def _whisper(config: Mapping[str, Any], bounds: SampleBounds | None) -> ModelSize:
    """Return the size of Whisper's encoder and decoder (Radford et al. 2022), as built by transformers."""
    width, vocabulary = _integer(config, "d_model"), _integer(config, "vocab_size")
    encoder, decoder = _integer(config, "encoder_layers"), _integer(config, "decoder_layers")
    encoder_mlp, decoder_mlp = _integer(config, "encoder_ffn_dim"), _integer(config, "decoder_ffn_dim")
    max_positions, max_tokens = _integer(config, "max_source_positions"), _integer(config, "max_target_positions")
    attention, norm = 4 * width * width + 3 * width, 2 * width
    mlp_parameters = [2 * width * wide + wide + width for wide in (encoder_mlp, decoder_mlp)]
    mel = _integer(config, "num_mel_bins")
    front_parameters = 3 * mel * width + 3 * width * width + 2 * width + max_positions * width
    encoder_parameters = front_parameters + encoder * (attention + mlp_parameters[0] + 2 * norm) + norm
    total = (
        encoder_parameters
        + decoder * (2 * attention + mlp_parameters[1] + 3 * norm)
        + norm
        + (vocabulary + max_tokens) * width
    )
    positions, tokens = (
        (max_positions, max_tokens)
        if bounds is None
        else _lengths(
            bounds, max_positions, max_tokens, _integer({"second": _WINDOW_SECONDS, **config}, "chunk_length", "second")
        )
    )
    front_activations = 2 * mel + 6 * width  # features, and both convolutions before and after their activation
    encoder_activations = positions * (_saved_activations(width, encoder_mlp) * encoder + front_activations)
    cross_activations = positions * 2 * width * decoder  # keys and values of what was heard
    outputs = tokens * 3 * vocabulary
    decoder_activations = (
        tokens * (_saved_activations(width, decoder_mlp) + _CROSS_ATTENTION_WIDTHS * width) * decoder + outputs
    )
    evaluation = max_positions * (2 * width * decoder + _working_activations(width, encoder_mlp)) + tokens * vocabulary
    activations = encoder_activations + cross_activations + decoder_activations
    return ModelSize(
        total,
        encoder + decoder,
        activations,
        encoder_parameters,
        encoder_activations,
        outputs,
        positions * _working_activations(width, encoder_mlp),
        evaluation,
        matrices=encoder * (attention + mlp_parameters[0]) + decoder * (2 * attention + mlp_parameters[1]),
    )


def _lengths(bounds: SampleBounds, positions: int, tokens: int, seconds: int) -> tuple[int, int]:
    """Return the encoder positions of the longest window, and the tokens of the longest text."""
    longest_text = min(tokens, bounds.longest.tokens)
    try:
        from training.tasks.whisper.features import Windows  # loads numpy
    except ImportError:  # a core without numpy: the full window is an upper bound
        return positions, longest_text
    rate = 2 * positions / seconds
    frames = int(Windows(bounds.window, 2 * positions, seconds).frames([math.ceil(bounds.longest.seconds * rate)])[0])
    return frames // 2, longest_text


def _decoder(config: Mapping[str, Any], sequence: int) -> ModelSize:
    """Return the size of a decoder like GPT-2, or like Llama (gated MLP of three matrices, grouped keys and values)."""
    width, layers = _integer(config, "hidden_size", "n_embd"), _integer(config, "num_hidden_layers", "n_layer")
    vocabulary, gated = _integer(config, "vocab_size"), config.get("model_type") in _GATED
    wide = _integer({"wide": 4 * width, **config}, "intermediate_size", "n_inner", "wide")
    heads = _integer({"heads": 1, **config}, "num_attention_heads", "n_head", "heads")
    groups = _integer({"heads": heads, **config}, "num_key_value_heads", "heads")
    head = _integer({"head": max(1, width // heads), **config}, "head_dim", "head")
    attention = 2 * width * heads * head + 2 * width * groups * head
    mlp_parameters = (3 if gated else 2) * width * wide
    small_parameters = 2 * width if gated else 4 * width + 4 * width + wide + width  # norms, and biases
    position_parameters = (
        0 if gated else _integer({"places": 1, **config}, "n_positions", "max_position_embeddings", "places") * width
    )
    tied = config.get("tie_word_embeddings", not gated)
    total = (
        vocabulary * width * (1 if tied else 2)
        + position_parameters
        + layers * (attention + mlp_parameters + small_parameters)
        + 2 * width
    )
    length = sequence or _integer({"length": 512, **config}, "n_positions", "max_position_embeddings", "length")
    activations = length * (_saved_activations(width, wide) * layers + 2 * vocabulary)
    matrices = (
        layers * (attention + mlp_parameters) if config.get("model_type") != "gpt2" else 0
    )  # whose layers are no Linear
    outputs = length * 2 * vocabulary
    evaluation = outputs + length * _working_activations(width, wide)
    return ModelSize(total, layers, activations, outputs=outputs, evaluation=evaluation, matrices=matrices)


def _saved_activations(width: int, wide: int) -> int:
    """Return the activations of one token that a block saves for backward, without the attention matrix, which is
    recomputed (Korthikanti et al. 2022, arXiv 2205.05198, section 4: 34 sbh in bytes of 16-bit numbers)."""
    return 9 * width + 2 * wide


def _working_activations(width: int, wide: int) -> int:
    """Return the activations of one token that a block holds at once if nothing is saved: residual stream and MLP."""
    return 3 * width + wide
