"""Whether a model trains in stages as it does whole: the same losses and gradients, bit for bit, in one process.

A stage does the arithmetic of the whole model on the same numbers, so any difference is a mistake: blocks that hand
each other more than a hidden state, a module that two stages need. Such a model is refused before anything is sent. The
probe looks at the whole model on the meta device, and then trains a small one of the same configuration: as many
stages, cut in the same way, each of at most two blocks of the encoder and two of the decoder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from profiles.errors import BadInput
from training.layouts.stages.anatomy import MODEL_ERRORS
from training.layouts.stages.cut import CutModel, refuse_other_count
from training.layouts.stages.pretrained_stage import build_stage, examine_pretrained
from training.layouts.stages.stage import Cut, Departing, StageModel
from training.tasks.base import Batch

_WORDS, _LENGTH, _SAMPLES, _HEADS = 64, 12, 2, 2
_SMALL = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "vocab_size": _WORDS, "max_source_positions": 16, "num_attention_heads": _HEADS,
    "encoder_attention_heads": _HEADS, "decoder_attention_heads": _HEADS,
}  # fmt: skip
"""Numbers of a configuration that do not change how a model computes, with those of the probe."""
_HINT = "train it whole, or with a method that needs less memory"


def forward_in_one_process(
    stages: Sequence[StageModel], batch: Batch, seed: int | None = None
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Compute the forward of one micro-batch through all stages.

    Returns:
        The scalar loss, and a function that adds the micro-batch's gradients to those of the stages' parameters.
    """
    requires_grad: tuple[bool, ...] = ()
    departed: tuple[torch.Tensor, ...] = ()
    crossings: list[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
    for stage in stages:
        flags = zip(departed, requires_grad, strict=True)
        arrived = [tensor.detach().requires_grad_(is_required) for tensor, is_required in flags]
        result = stage.forward(batch, arrived, seed)
        departed = result.tensors if isinstance(result, Departing) else (result,)
        crossings.append((arrived, departed))
        requires_grad = stage.departing_require_grad(requires_grad)

    def backward() -> None:
        gradients: list[torch.Tensor | None] = [torch.ones_like(crossings[-1][1][0])]
        for arrived, departed in reversed(crossings):
            _backward(departed, gradients)
            gradients = [tensor.grad for tensor in arrived]

    return departed[0].detach(), backward


def _backward(departed: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    sent = zip(departed, gradients, strict=True)
    pairs = [(tensor, gradient) for tensor, gradient in sent if gradient is not None and tensor.requires_grad]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def gradients_of(stages: Sequence[StageModel]) -> dict[str, torch.Tensor]:
    """Return the gradients of all stages by name; those of shared weights are summed in the order of the stages."""
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return gradients


def compare(model: StageModel, stages: Sequence[StageModel], batch: Batch, seed: int | None = None) -> None:
    """Compute a batch with a model of one stage and with its stages.

    Raises:
        BadInput: the losses or gradients differ; the message says which.
    """
    results = []
    for parts in ([model], stages):
        loss, backward = forward_in_one_process(parts, batch, seed)
        backward()
        results.append({"the loss": loss} | gradients_of(parts))
    expected, computed = results
    different = [name for name in expected | computed if not _is_same(expected.get(name), computed.get(name))]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise BadInput(
            f"{type(model.module).__name__} trains otherwise in {len(stages)} stages than whole: "
            f"{'' if different[0] == 'the loss' else 'the gradient of '}{different[0]}{more} differ",
            _HINT,
        )


def _is_same(expected: torch.Tensor | None, computed: torch.Tensor | None) -> bool:
    if expected is None or computed is None:
        return expected is computed
    return torch.equal(expected, computed)


def probe(architecture: Any, config: Any, bounds: tuple[int, ...], device: str = "cpu") -> None:
    """Compare a small transformers model of this configuration with its stages; takes about a second, and no files.

    Args:
        architecture: the class of the model.
        bounds: the cut of the real model, see :class:`~training.layouts.stages.stage.Cut`.
        device: what computes both.

    Raises:
        BadInput: it cannot be cut, a small one cannot be made, or it trains otherwise in stages; the message says why.
    """
    try:
        refuse_other_count(bounds, examine_pretrained(architecture, config), architecture.__name__)
        small, small_bounds = small_config(config, bounds)
        cuts = (Cut((0, small_bounds[-1]), 0), *(Cut(small_bounds, k) for k in range(len(bounds) - 1)))
        models = (build_stage(architecture, small, cut).train().to(device) for cut in cuts)
        whole, *stages = (CutModel(model, loss_of) for model in models)
        samples = {name: numbers.to(device) for name, numbers in samples_for(small).items()}
        compare(whole, stages, samples, seed=1)
    except MODEL_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{architecture.__name__} cannot be tried in stages: {reason}", _HINT) from error


def small_config(config: Any, bounds: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Return a configuration of the same kind with narrow layers and few blocks, and the cut of its blocks."""
    small = copy.deepcopy(config)
    for name, number in _SMALL.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, number)
    heads, shared_heads = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    if heads:  # a head stays as wide as it is: positions may turn a fixed number of its dimensions
        small.hidden_size = _HEADS * (config.hidden_size // heads)
    if shared_heads:
        small.num_key_value_heads = _HEADS if shared_heads == heads else 1
    for name in vars(config):
        token = getattr(small, name)
        if name.endswith("_token_id") and isinstance(token, int) and token >= _WORDS:
            setattr(small, name, 3)
    encoder = config.encoder_layers if config.is_encoder_decoder else 0
    blocks = [[*_two(range(first, min(last, encoder))), *_two(range(max(first, encoder), last))]
              for first, last in pairwise(bounds)]  # fmt: skip
    _keep_blocks(small, [block for stage in blocks for block in stage], encoder)
    return small, (0, *accumulate(map(len, blocks)))


def _two(blocks: range) -> list[int]:
    return sorted({blocks[0], blocks[-1]}) if blocks else []


def _keep_blocks(config: Any, blocks: Sequence[int], encoder: int) -> None:
    if encoder:
        config.encoder_layers = sum(block < encoder for block in blocks)
        config.decoder_layers = len(blocks) - config.encoder_layers
        return
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:  # one entry a block, such as the kind of its attention
            setattr(config, name, [value[block] for block in blocks])
    config.num_hidden_layers = len(blocks)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss that a transformers model computes itself."""
    loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss


def samples_for(config: Any) -> dict[str, torch.Tensor]:
    """Return sequences of different lengths, with sounds for a model that hears."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(4, _WORDS, (_SAMPLES, _LENGTH), generator=generator)
    mask = (torch.arange(_LENGTH) < torch.tensor([[_LENGTH], [_LENGTH - 5]])).long()
    labels = words.masked_fill(mask == 0, -100)
    if not config.is_encoder_decoder:
        return {"input_ids": words, "attention_mask": mask, "labels": labels}
    features = torch.randn(_SAMPLES, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    return {
        "input_features": features, "decoder_input_ids": words, "decoder_attention_mask": mask, "labels": labels
    }  # fmt: skip
