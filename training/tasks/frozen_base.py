"""Precision of the frozen base weights below adapters: they are not trained, so they need not be in float32.

- ``bf16``: as autocast would cast them at each use, so a step gives the same bits (float32 is needed only for weights
  that are updated: Micikevicius et al. 2018, section 3.1).
- ``int8``: LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339), with one scale per row; by bitsandbytes.
- ``nf4``: 4-bit NormalFloat with one scale per 64 weights (Dettmers et al. 2023, arXiv:2305.14314, section 3); by
  bitsandbytes.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from profiles.errors import BadInput
from profiles.installation import package_line
from profiles.schema import QUANTISED, ModelSettings
from training.hardware.device import Precision

_OUTLIER = 6.0
"""Inputs above this magnitude are multiplied in 16 bits (LLM.int8(), section 3.2)."""


def with_frozen_base(model: nn.Module, settings: ModelSettings, precision: Precision) -> nn.Module:
    """Convert the weights below adapters to ``base_precision``, in place; ``auto`` is bf16 if steps compute in bf16.

    Raises:
        BadInput: bf16 was requested but steps do not compute in it, or bitsandbytes does not support the device.
    """
    base_precision = settings.base_precision if settings.tuning == "lora" else "fp32"
    if base_precision in QUANTISED:
        _check_device(base_precision, precision.device)
    elif base_precision != "fp32" and precision.dtype is torch.bfloat16:
        for parameter in _cast_by_autocast(model):
            parameter.data = parameter.data.to(torch.bfloat16)
    elif base_precision == "bf16":
        message = f"base_precision = bf16: steps on {precision.device.type} compute in {precision.name} here"
        raise BadInput(message, "set mixed_precision = bf16, or base_precision = auto")
    return model


def _cast_by_autocast(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the frozen weights that autocast casts at every use: those of linear layers only."""
    from transformers.pytorch_utils import Conv1D  # takes a second to import; most models have none

    linear, others = dict[int, nn.Parameter](), set[int]()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if type(module) in (nn.Linear, Conv1D):
                linear[id(parameter)] = parameter
            else:  # an embedding shares its weights with the output layer
                others.add(id(parameter))
    for key, parameter in linear.items():
        if key not in others and not parameter.requires_grad and parameter.dtype == torch.float32:
            yield parameter


def with_quantised_base(model: Any, precision: str) -> Any:
    """Quantise the weights of all linear layers but the output to ``int8`` or ``nf4``, in place.

    Always on the CPU, so that all members hold the same numbers.

    Raises:
        BadInput: bitsandbytes is missing, or does not work on this machine.
    """
    library = _bitsandbytes(precision)
    output = model.get_output_embeddings()
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not output}
    if not layers:
        raise BadInput(f"base_precision = {precision}: the model has no linear layers", "set base_precision = auto")
    for name, layer in layers.items():
        model.set_submodule(name, _QUANTISERS[precision](library, layer))
    for parameter in model.parameters():  # releases the mapped file, whose pages would count towards this process
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32, copy=True)
    setattr(model, _MARKS[precision], True)
    return model


def _bitsandbytes(precision: str) -> Any:
    try:
        library: Any = importlib.import_module("bitsandbytes")
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"base_precision = {precision} needs bitsandbytes, which cannot be used here: {reason}"
        hint = f"on every machine: {package_line('bitsandbytes')}; or set base_precision = auto"
        raise BadInput(message, hint) from error
    logging.getLogger(library.autograd._functions.__name__).setLevel(logging.ERROR)  # else a line at every layer
    return library


def _check_device(precision: str, device: torch.device) -> None:
    served = _bitsandbytes(precision).supported_torch_devices
    if device.type not in served:
        message = f"base_precision = {precision}: bitsandbytes does not work on {device.type}"
        others = " or ".join(name for name in ("cpu", "cuda", "mps") if name in served)
        raise BadInput(message, f"set device to {others}, or base_precision = auto")


def _in_8_bits(library: Any, layer: nn.Linear) -> nn.Module:
    small = library.nn.Linear8bitLt(
        layer.in_features, layer.out_features, False, has_fp16_weights=False, threshold=_OUTLIER, device="meta"
    )
    weight = library.nn.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
    small.weight, small.bias = weight.to("cpu"), layer.bias
    return small  # type: ignore[no-any-return]  # bitsandbytes is untyped


def _in_4_bits(library: Any, layer: nn.Linear) -> nn.Module:
    small = library.nn.Linear4bit(layer.in_features, layer.out_features, False, quant_type="nf4", device="meta")
    weight = library.nn.Params4bit(layer.weight.detach().float(), requires_grad=False, quant_type="nf4", module=small)
    small.weight, small.bias = weight.to("cpu"), layer.bias
    small.support_avx512bf16_for_cpu = False  # packs the weights in an evaluation as no training can read them
    return small  # type: ignore[no-any-return]  # bitsandbytes is untyped


_QUANTISERS = {"int8": _in_8_bits, "nf4": _in_4_bits}
_MARKS = {"int8": "is_loaded_in_8bit", "nf4": "is_loaded_in_4bit"}
"""Attributes by which peft chooses the adapter's class."""
