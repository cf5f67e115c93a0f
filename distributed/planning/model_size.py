"""How large a model is, from the files of its folder: no library that could load it is needed."""

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
from training.data_findings import Longest, longest_clip
from training.tasks.published_models import model_folder

_LONGEST_HEADER = 100_000_000
_SECONDS = 30
"""That a Whisper hears whose feature extractor does not say it."""
_CROSSING = 6
"""Numbers a width that attention to what was heard keeps of one token: input, norm, query, outputs."""
_GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "smollm3")
"""Model types whose MLP has three matrices, and no biases."""


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on."""

    parameters: int
    layers: int = 12
    activations: int = 0
    """Numbers that one sample leaves for backward; 0: unknown. Of a Whisper: with a whole window."""
    encoder: int = 0
    """Parameters of an encoder that can be frozen."""
    encoder_activations: int = 0
    """Of ``activations``, those of that encoder: none where it is frozen."""
    outputs: int = 0
    """Of ``activations``, the probabilities of the words, which no block holds: they are not computed anew."""
    working: int = 0
    """Numbers that one sample needs for a moment in the encoder, whether or not anything is kept for backward."""
    listening: int = 0
    """Numbers that one sample of an evaluation needs, of which a Whisper hears whole windows; nothing is kept for
    backward."""
    matrices: int = 0
    """Parameters in linear layers, which can be held in 8 bits."""
    teacher: ModelSize | None = None
    """Of the model that this one learns from."""


def size_for(profile: Profile) -> ModelSize | None:
    """Return the size of a profile's model as this machine's files tell it; ``None`` where they do not, as of a custom
    job."""
    model = profile.model
    folder = model_folder(model.model_path) if model.trait != "own code" else None
    length = profile.data.block_size if model.trait == "texts" else 0
    longest = longest_clip(profile.data) if model.trait == "speech" and folder is not None else None
    window = "full" if model.from_scratch and profile.data.window == "auto" else profile.data.window
    heard = SampleBounds(window, longest) if longest is not None else None
    found = size_of(folder, length, model.student_layers, heard) if folder is not None else None
    teacher = model_folder(model.teacher_path) if model.teacher_path else None
    return replace(found, teacher=size_of(teacher)) if found is not None and teacher is not None else found


@dataclass(frozen=True)
class SampleBounds:
    """What a training hears at most of a sample."""

    window: str
    longest: Longest


def size_of(folder: Path, sequence: int = 0, kept: int = 0, heard: SampleBounds | None = None) -> ModelSize | None:
    """Return the size of the model in a folder; ``None`` where neither its weights nor its configuration tell.

    Args:
        sequence: tokens of one text; 0: as long as the model takes.
        kept: layers of a Whisper's decoder that a student of it has; 0: all.
        heard: of a Whisper, what its training hears; ``None``: whole windows, and texts as long as it can write.
    """
    config, ears = _read(folder / "config.json"), _read(folder / "preprocessor_config.json")
    if kept:
        config["decoder_layers"] = kept
    try:
        shape = (
            _whisper({**ears, **config}, heard) if config.get("model_type") == "whisper" else _decoder(config, sequence)
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        shape = None
    counted = 0 if kept else sum(_elements(path) for path in folder.glob("*.safetensors"))
    if counted and shape is not None:
        return replace(shape, parameters=counted)
    return ModelSize(counted) if counted else shape


def _read(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _elements(path: Path) -> int:
    """Return the numbers in a safetensors file, by its header; 0 where it has none."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= _LONGEST_HEADER else {}
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        return sum(math.prod(int(side) for side in shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return 0


def _whole(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and 0 < config[name] < 2**40:
            return int(config[name])
    raise KeyError(names[0])


def _whisper(config: Mapping[str, Any], listened: SampleBounds | None) -> ModelSize:
    """Encoder and decoder of Whisper (Radford et al. 2022), as transformers builds them."""
    width, words = _whole(config, "d_model"), _whole(config, "vocab_size")
    encoder, decoder = _whole(config, "encoder_layers"), _whole(config, "decoder_layers")
    wide_in, wide_out = _whole(config, "encoder_ffn_dim"), _whole(config, "decoder_ffn_dim")
    whole, written = _whole(config, "max_source_positions"), _whole(config, "max_target_positions")
    attention, norm = 4 * width * width + 3 * width, 2 * width
    feet = [2 * width * wide + wide + width for wide in (wide_in, wide_out)]
    mel = _whole(config, "num_mel_bins")
    ears = 3 * mel * width + 3 * width * width + 2 * width + whole * width
    heard_by = ears + encoder * (attention + feet[0] + 2 * norm) + norm
    total = heard_by + decoder * (2 * attention + feet[1] + 3 * norm) + norm + (words + written) * width
    positions, tokens = (
        (whole, written)
        if listened is None
        else _lengths(listened, whole, written, _whole({"second": _SECONDS, **config}, "chunk_length", "second"))
    )
    front = 2 * mel + 6 * width  # features, and both convolutions before and after their activation
    of_encoder = positions * (_kept(width, wide_in) * encoder + front)
    crossed = positions * 2 * width * decoder  # keys and values of what was heard
    outputs = tokens * 3 * words
    of_text = tokens * (_kept(width, wide_out) + _CROSSING * width) * decoder + outputs
    listening = whole * (2 * width * decoder + _moment(width, wide_in)) + tokens * words
    kept = of_encoder + crossed + of_text
    return ModelSize(
        total,
        encoder + decoder,
        kept,
        heard_by,
        of_encoder,
        outputs,
        positions * _moment(width, wide_in),
        listening,
        matrices=encoder * (attention + feet[0]) + decoder * (2 * attention + feet[1]),
    )


def _lengths(heard: SampleBounds, positions: int, tokens: int, seconds: int) -> tuple[int, int]:
    """Return the positions of the longest window, and the tokens of the longest text."""
    texts = min(tokens, heard.longest.tokens)
    try:
        from training.tasks.whisper.features import Windows  # loads numpy
    except ImportError:  # a light core: it takes the whole window, which is never too little
        return positions, texts
    rate = 2 * positions / seconds
    frames = int(Windows(heard.window, 2 * positions, seconds).frames([math.ceil(heard.longest.seconds * rate)])[0])
    return frames // 2, texts


def _decoder(config: Mapping[str, Any], sequence: int) -> ModelSize:
    """A decoder like GPT-2, or like Llama: an MLP of three matrices, keys and values of fewer heads."""
    width, layers = _whole(config, "hidden_size", "n_embd"), _whole(config, "num_hidden_layers", "n_layer")
    words, gated = _whole(config, "vocab_size"), config.get("model_type") in _GATED
    wide = _whole({"wide": 4 * width, **config}, "intermediate_size", "n_inner", "wide")
    heads = _whole({"heads": 1, **config}, "num_attention_heads", "n_head", "heads")
    groups = _whole({"heads": heads, **config}, "num_key_value_heads", "heads")
    head = _whole({"head": max(1, width // heads), **config}, "head_dim", "head")
    attention = 2 * width * heads * head + 2 * width * groups * head
    feet = (3 if gated else 2) * width * wide
    small = 2 * width if gated else 4 * width + 4 * width + wide + width  # norms, and biases
    places = 0 if gated else _whole({"places": 1, **config}, "n_positions", "max_position_embeddings", "places") * width
    tied = config.get("tie_word_embeddings", not gated)
    total = words * width * (1 if tied else 2) + places + layers * (attention + feet + small) + 2 * width
    length = sequence or _whole({"length": 512, **config}, "n_positions", "max_position_embeddings", "length")
    kept = length * (_kept(width, wide) * layers + 2 * words)
    matrices = layers * (attention + feet) if config.get("model_type") != "gpt2" else 0  # whose layers are no Linear
    outputs = length * 2 * words
    listening = outputs + length * _moment(width, wide)
    return ModelSize(total, layers, kept, outputs=outputs, listening=listening, matrices=matrices)


def _kept(width: int, wide: int) -> int:
    """Numbers that a block keeps of one token for backward, without the matrix of attention, which is made again
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4: 34 bytes of two each for a width of 4)."""
    return 9 * width + 2 * wide


def _moment(width: int, wide: int) -> int:
    """Numbers of one token that a block holds at once where nothing is kept: what goes past it, and its MLP."""
    return 3 * width + wide
