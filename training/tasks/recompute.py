"""Trading compute for memory: activations are recomputed in backward instead of kept."""

from __future__ import annotations

from typing import Any


def recompute_activations(model: Any) -> None:
    """Switch activation checkpointing on in a ``transformers`` model, also where its weights are frozen.

    The non-reentrant form keeps the random state of dropout and needs no input that has a gradient.
    """
    # transformers renamed the method within version 5; the first argument is the same
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.enable_input_require_grads()
