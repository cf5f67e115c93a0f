"""Memory that a Whisper needs, from its configuration and the longest recording; loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from profiles.schema import Profile
from speech.inputs.data_findings import Longest, longest_clip
from training.tasks.inputs.model_size import (
    BlockSize,
    ModelSize,
    integer_in,
    saved_activations,
    size_of,
    sum_of_blocks,
    with_ends,
    working_activations,
)
from training.tasks.published_models import model_folder

_WINDOW_SECONDS = 30
"""Window of a Whisper whose feature extractor does not state it."""
_CROSS_ATTENTION_WIDTHS = 5
"""Activations of cross-attention saved per token, in widths: input, norm, query, output and its copy."""


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
    max_positions, max_tokens = (
        integer_in(config, "max_source_positions"),
        integer_in(config, "max_target_positions"),
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
    working = working_activations(width, integer_in(config, "encoder_ffn_dim"))
    return sum_of_blocks(
        [*_encoder_blocks(config, positions), *_decoder_blocks(config, positions, tokens)],
        outputs=tokens * 3 * vocabulary,
        evaluation=max_positions * working,
        working=positions * working,
        tied=vocabulary * width,
    )


def _encoder_blocks(config: Mapping[str, Any], positions: int) -> list[BlockSize]:
    """Return the blocks of the encoder: both convolutions and the positions in the first one, the final norm in the
    last one."""
    width, wide, mel = (integer_in(config, name) for name in ("d_model", "encoder_ffn_dim", "num_mel_bins"))
    matrices, norm = 4 * width * width + 3 * width + 2 * width * wide + wide + width, 2 * width
    block = BlockSize(
        parameters=matrices + 2 * norm,
        matrices=matrices,
        multiplications=positions * (matrices + 2 * positions * width),
        activations=positions * saved_activations(width, wide),
        boundary=positions * width,
        encoded=positions * width,
        in_encoder=True,
    )
    convolutions, position_parameters = (
        3 * mel * width + 3 * width * width + 2 * width,
        integer_in(config, "max_source_positions") * width,
    )
    front = replace(
        block,
        parameters=block.parameters + convolutions + position_parameters,
        multiplications=block.multiplications + positions * (6 * mel * width + 3 * width * width),
        activations=block.activations + positions * (2 * mel + 6 * width),  # features, before and after activations
    )
    *others, back = (front, *[block] * (integer_in(config, "encoder_layers") - 1))
    return [*others, replace(back, parameters=back.parameters + norm)]


def _decoder_blocks(config: Mapping[str, Any], positions: int, tokens: int) -> list[BlockSize]:
    width, wide, vocabulary = (integer_in(config, name) for name in ("d_model", "decoder_ffn_dim", "vocab_size"))
    max_positions, max_tokens = (
        integer_in(config, "max_source_positions"),
        integer_in(config, "max_target_positions"),
    )
    attention, norm = 4 * width * width + 3 * width, 2 * width
    matrices = 2 * attention + 2 * width * wide + wide + width
    encoded_matrices = 2 * width * width  # make keys and values of what was heard
    token_activations = saved_activations(width, wide) + _CROSS_ATTENTION_WIDTHS * width
    block = BlockSize(
        parameters=matrices + 3 * norm,
        matrices=matrices,
        multiplications=tokens * (matrices - encoded_matrices + 2 * (tokens + positions) * width)
        + positions * encoded_matrices,
        activations=tokens * token_activations + positions * 2 * width,
        boundary=(tokens + positions) * width,
        encoded=positions * width,
        evaluation=max_positions * 2 * width,
    )
    return with_ends(
        [block] * integer_in(config, "decoder_layers"),
        embedding=(vocabulary + max_tokens) * width,
        head=vocabulary * width + norm,
        multiplications=tokens * vocabulary * width,
        outputs=tokens * vocabulary,
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
