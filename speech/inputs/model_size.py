"""Memory that a Whisper needs, from its configuration and the longest recording; loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from profiles.schema import Profile
from speech.inputs.data_findings import Longest, longest_clip
from training.tasks.inputs.model_size import (
    ModelSize,
    integer_in,
    saved_activations,
    size_of,
    working_activations,
)
from training.tasks.published_models import model_folder

_WINDOW_SECONDS = 30
"""Window of a Whisper whose feature extractor does not state it."""
_CROSS_ATTENTION_WIDTHS = 6
"""Activations of cross-attention saved per token, in widths: input, norm, query, outputs."""


@dataclass(frozen=True)
class SampleBounds:
    """Largest sample of a speech training."""

    window: str
    longest: Longest


def size_for(profile: Profile) -> ModelSize | None:
    """Return the size of a profile's model and teacher from files on this machine; ``None`` if they are missing."""
    model = profile.model
    folder = model_folder(model.model_path)
    longest = longest_clip(profile.data) if folder is not None else None
    window = "full" if model.from_scratch and profile.data.window == "auto" else profile.data.window
    bounds = SampleBounds(window, longest) if longest is not None else None
    student = {"decoder_layers": model.student_layers} if model.student_layers else {}
    size = (
        size_of(folder, lambda config: whisper_size({**config, **student}, bounds), is_whole=not student)
        if folder is not None
        else None
    )
    teacher = model_folder(model.teacher_path) if model.teacher_path else None
    return replace(size, teacher=size_of(teacher, whisper_size)) if size and teacher else size


def whisper_size(config: Mapping[str, Any], bounds: SampleBounds | None = None) -> ModelSize:
    """Return the size of Whisper's encoder and decoder (Radford et al. 2022), as built by transformers.

    Args:
        bounds: largest sample; ``None``: full windows, and texts of the maximal length.
    """
    width, vocabulary = integer_in(config, "d_model"), integer_in(config, "vocab_size")
    encoder, decoder = integer_in(config, "encoder_layers"), integer_in(config, "decoder_layers")
    encoder_mlp, decoder_mlp = integer_in(config, "encoder_ffn_dim"), integer_in(config, "decoder_ffn_dim")
    max_positions, max_tokens = (
        integer_in(config, "max_source_positions"),
        integer_in(config, "max_target_positions"),
    )
    attention, norm = 4 * width * width + 3 * width, 2 * width
    mlp_parameters = [2 * width * wide + wide + width for wide in (encoder_mlp, decoder_mlp)]
    mel = integer_in(config, "num_mel_bins")
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
            bounds,
            max_positions,
            max_tokens,
            integer_in({"second": _WINDOW_SECONDS, **config}, "chunk_length", "second"),
        )
    )
    front_activations = 2 * mel + 6 * width  # features, and both convolutions before and after their activation
    encoder_activations = positions * (saved_activations(width, encoder_mlp) * encoder + front_activations)
    cross_activations = positions * 2 * width * decoder  # keys and values of what was heard
    outputs = tokens * 3 * vocabulary
    decoder_activations = (
        tokens * (saved_activations(width, decoder_mlp) + _CROSS_ATTENTION_WIDTHS * width) * decoder + outputs
    )
    evaluation = max_positions * (2 * width * decoder + working_activations(width, encoder_mlp)) + tokens * vocabulary
    activations = encoder_activations + cross_activations + decoder_activations
    return ModelSize(
        total,
        encoder + decoder,
        activations,
        encoder_parameters,
        encoder_activations,
        outputs,
        positions * working_activations(width, encoder_mlp),
        evaluation,
        matrices=encoder * (attention + mlp_parameters[0]) + decoder * (2 * attention + mlp_parameters[1]),
    )


def _lengths(bounds: SampleBounds, positions: int, tokens: int, seconds: int) -> tuple[int, int]:
    """Return the encoder positions of the longest window, and the tokens of the longest text."""
    longest_text = min(tokens, bounds.longest.tokens)
    try:
        from speech.whisper.features import Windows  # loads numpy
    except ImportError:  # a core without numpy: the full window is an upper bound
        return positions, longest_text
    rate = 2 * positions / seconds
    frames = int(Windows(bounds.window, 2 * positions, seconds).frames([math.ceil(bounds.longest.seconds * rate)])[0])
    return frames // 2, longest_text
