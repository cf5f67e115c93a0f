"""Low-rank adapters through peft (Hu et al. 2021, arXiv:2106.09685): W' = W + (alpha / rank) B A."""

from __future__ import annotations

import difflib
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from profiles.errors import BadInput
from profiles.schema import ModelSettings

_HOW_TO_OPEN = """\
# Adapter

This folder holds LoRA adapters for `{base}`, not a whole model. Open it with

    from peft import PeftModel
    model = PeftModel.from_pretrained(BASE_MODEL, "THIS_FOLDER").merge_and_unload()

or train with `lora_merge = true` to get a folder that opens by itself.
"""


def add_lora(
    model: PreTrainedModel, settings: ModelSettings, all_linear: tuple[str, ...], exclude: str | None = None
) -> PeftModel:
    """Freeze ``model`` and add adapters to it.

    Args:
        all_linear: what ``lora_target_modules = all-linear`` stands for; empty: every linear layer but the output.
        exclude: regular expression of full module names that get no adapter.

    Raises:
        BadInput: a target name is no linear layer of the model; the message lists those there are.
    """
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=_targets(model, settings.lora_target_modules, all_linear),
        exclude_modules=exclude,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        bias="none",
    )
    config.base_model_name_or_path = settings.model_path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is being renamed
        return cast(PeftModel, get_peft_model(model, config))


def read_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return ``model`` with the adapters of ``folder`` merged into its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return cast(PreTrainedModel, PeftModel.from_pretrained(model, str(folder)).merge_and_unload())


def linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of all linear layers, sorted."""
    linear = (name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)))
    return sorted({name.rpartition(".")[2] for name in linear})


def _targets(model: nn.Module, wanted: str, all_linear: tuple[str, ...]) -> list[str] | str:
    if wanted.strip() == "all-linear":
        return list(all_linear) or "all-linear"
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    there = linear_names(model)
    for name in names or [""]:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "choose among them, or 'all-linear'"
            raise BadInput(f"lora_target_modules: no layer {name!r} in the model; it has: {', '.join(there)}", hint)
    return names


def merged_copy(model: PeftModel) -> PreTrainedModel:
    """Return the base model with the adapters merged into its weights, on the CPU; ``model`` stays as it is.

    Only the adapted weights are copied in memory: the others are shared with the live model where it is on the CPU.
    """
    base = cast(PreTrainedModel, model.get_base_model())
    with torch.device("meta"):
        fresh = type(base)(base.config)
    fresh.load_state_dict(_merged_weights(base), strict=False, assign=True)
    fresh.tie_weights()
    fresh.generation_config = base.generation_config
    return fresh


def _merged_weights(base: nn.Module) -> dict[str, torch.Tensor]:
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        merged = tensor.detach()
        if owner and leaf == "weight":
            merged = merged + _delta(adapted[owner])
        weights[f"{owner}.{leaf}" if owner else name] = merged.cpu()
    return weights


def _delta(layer: Any) -> torch.Tensor:
    deltas = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters]
    return cast(torch.Tensor, sum(deltas[1:], deltas[0])).detach()


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapters alone, and a page that says how to open them."""
    model.save_pretrained(str(directory))
    base = model.peft_config["default"].base_model_name_or_path
    (directory / "README.md").write_text(_HOW_TO_OPEN.format(base=base), encoding="utf-8")
