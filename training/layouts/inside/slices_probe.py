"""Whether a model trains in slices as it does whole: a small one of its configuration, before anything is trained.

A plan that forgets that the gradient of a weight is a part only, or a layer that reckons with the whole number of
heads, would train otherwise without an error.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from profiles.errors import BadInput
from training.layouts.carrier import gather_among
from training.layouts.inside.inside_model import cause_of
from training.layouts.inside.slices import SlicedWeights
from training.layouts.inside.tensor_plans import HINT, styles_of
from training.layouts.inside.world import World
from training.layouts.stages.anatomy import MODEL_ERRORS
from training.layouts.stages.probe import loss_of, samples_for, small_config
from training.numerics.randomness import preserved_generators, seed_with

_DIFFERENCE = 1e-2
"""Of a gradient, relative to its largest element; sums in another order differ by a thousandth of that."""


def probe_slices(model: Any, world: World, device: torch.device) -> None:
    """Compare the gradients of a small model in slices with those of the whole one; all devices do so together.

    Args:
        model: a transformers model; a small one of its class and configuration is made.

    Raises:
        BadInput: they differ, or no small model can be made; the message says why.
    """
    name = type(model).__name__
    try:
        with preserved_generators(device):
            seed_with((0,), device)
            whole = type(model)._from_config(_small_config(model.config, world.mesh.size()), dtype=torch.float32)
        different = _different_gradients(whole.eval(), world, device)
    except MODEL_ERRORS as error:
        if (loss := cause_of(error)) is not error:
            raise loss from error
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"layout = tensor: {name} cannot be tried in slices: {reason}", HINT) from error
    for payload in gather_among(world.carrier, ",".join(different).encode()):
        if payload:
            first, *others = payload.decode().split(",")
            more = f" and {len(others)} more differ" if others else " differs"
            raise BadInput(f"layout = tensor: {name} trains otherwise in slices: the gradient of {first}{more}", HINT)


def _small_config(config: Any, devices: int) -> Any:
    """Return a configuration of the same kind with few blocks, narrow layers and two heads for each device."""
    if config.is_encoder_decoder:
        small, _ = small_config(config, (0, config.encoder_layers + config.decoder_layers))
        small.encoder_attention_heads = config.encoder_attention_heads
        small.decoder_attention_heads = config.decoder_attention_heads
        return small
    small, _ = small_config(config, (0, config.num_hidden_layers))
    heads, shared_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", 0)
    small.num_attention_heads, small.hidden_size = 2 * devices, 2 * devices * (config.hidden_size // heads)
    if shared_heads:
        small.num_key_value_heads = 2 * devices if shared_heads == heads else devices
    return small


def _different_gradients(whole: Any, world: World, device: torch.device) -> list[str]:
    """Return the names of the weights whose gradients differ on this device."""
    sliced = copy.deepcopy(whole)
    slices = SlicedWeights(sliced, styles_of(sliced, world.mesh.size()), world.mesh.get_group(), device)
    expected, computed = _gradients(whole.to(device)), _gradients(sliced, slices)
    different = []
    for name, gradient in expected.items():
        rows = slices.rows.get(name)
        if rows is not None:
            gradient = gradient.narrow(rows.dimension, rows.start, rows.end - rows.start)
        limit = _DIFFERENCE * float(expected[name].abs().max())
        if name not in computed or bool(((computed[name] - gradient).abs() > limit).any()):
            different.append(name)
    return different


def _gradients(model: nn.Module, slices: SlicedWeights | None = None) -> dict[str, torch.Tensor]:
    batch = {name: tensor.to(next(model.parameters()).device) for name, tensor in samples_for(model.config).items()}
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    if slices is not None:
        slices.sum_gradients(torch.zeros(1, dtype=torch.float64))
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
