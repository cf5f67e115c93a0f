"""Whisper's encoder for windows of any length.

``transformers`` refuses every other length than the model's own, though nothing in the encoder depends on it: its
positions are absolute, so a shorter window has the first of them. This forward pass goes through the same modules, so
adapters, hooks, recomputed activations and mixed precision hold in it; at the full length it gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput


def encode(whisper: Any, features: torch.Tensor) -> BaseModelOutput:
    """Return the encoder's output [batch, frames / 2, width] for ``features`` [batch, mels, frames].

    Nothing is kept for backward where no weight of the encoder is trained.

    Args:
        whisper: a ``WhisperForConditionalGeneration``.

    Raises:
        ValueError: an odd number of frames, or more than the model has positions for.
    """
    encoder = whisper.model.encoder
    frames, most = features.shape[-1], 2 * encoder.max_source_positions
    if frames % 2 or frames > most:
        raise ValueError(f"a window has an even number of frames up to {most}, not {frames}")
    trained = any(parameter.requires_grad for parameter in encoder.parameters())
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        return BaseModelOutput(last_hidden_state=_through(encoder, _masked(whisper, features, most)))


def _masked(whisper: Any, features: torch.Tensor, most: int) -> torch.Tensor:
    """Blank parts of ``features`` where the model's configuration asks for SpecAugment (Park et al. 2019).

    The masks are drawn for the full window, and what falls beyond a cut one is lost: a clip is masked as often as in a
    full window, and a mask may be longer than the cut one.
    """
    if not (whisper.model.training and getattr(whisper.config, "apply_spec_augment", False)):
        return features
    frames = features.shape[-1]
    window = nn.functional.pad(features, (0, most - frames))  # always a copy: it is masked in place
    masked: torch.Tensor = whisper.model._mask_input_features(window)[..., :frames]
    return masked


def _through(encoder: Any, features: torch.Tensor) -> torch.Tensor:
    hidden = nn.functional.gelu(encoder.conv1(features))
    hidden = nn.functional.gelu(encoder.conv2(hidden)).permute(0, 2, 1)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    hidden = nn.functional.dropout(hidden, p=encoder.dropout, training=encoder.training)
    for layer in encoder.layers:
        if encoder.training and encoder.layerdrop > 0.0 and torch.rand([]) < encoder.layerdrop:
            continue
        hidden = layer(hidden, None)
    out: torch.Tensor = encoder.layer_norm(hidden)
    return out
