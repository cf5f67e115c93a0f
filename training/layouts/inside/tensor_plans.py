"""Which matrices of a transformers model can be divided over devices, and how: the tensor-parallel plan of its class.

transformers writes plans as data: the name of a layer, with ``*`` for a number, and a style. Where it has none and one
is a few lines, it stands here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from profiles.errors import BadInput

STYLES = {
    "colwise": "colwise", "colwise_gather_output": "colwise_gather_output", "colwise_rep": "colwise_gather_output",
    "rowwise": "rowwise", "rowwise_split_input": "rowwise_split_input", "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "embedding_rowwise", "heads": "heads",
    "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
}  # fmt: skip
"""Styles that are supported, by their names in plans; ``replicate`` needs nothing. ``heads`` is of ours: an attention
that counts the heads of its device."""
_HEADS = ("encoder_attention_heads", "decoder_attention_heads", "num_attention_heads", "num_key_value_heads")
_PROJECTIONS = ("q_proj", "k_proj", "qkv_proj", "query_key_value")
"""Layers whose outputs are heads."""
_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"}
_PERCEPTRON = {"fc1": "colwise", "fc2": "rowwise"}
_WHISPER = (
    {
        f"model.{half}.layers.*.{part}{layer}": style
        for half, parts in (("encoder", ("self_attn.",)), ("decoder", ("self_attn.", "encoder_attn.")))
        for layers, prefixes in ((_ATTENTION, parts), (_PERCEPTRON, ("",)))
        for part in prefixes
        for layer, style in layers.items()
    }
    | {
        f"model.{half}.layers.*.{attention}": "heads"
        for half, attention in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn"))
    }
    | {"model.decoder.embed_tokens": "embedding_rowwise", "proj_out": "colwise_gather_output"}
)
OF_OURS = {"whisper": _WHISPER}
"""Plans by the type of the model, for those that have none in transformers."""
HINT = "set layout = shard"


def refusal_in_slices(config: Any, devices: int) -> str:
    """Return why the matrices of a transformers model cannot be divided over so many devices; empty: they can.

    Args:
        config: of the model.
    """
    text = config.get_text_config() if config.model_type not in OF_OURS else config
    plan = OF_OURS.get(config.model_type) or text.base_model_tp_plan
    if not plan:
        return f"is for models with a plan of what can be divided, and {config.model_type} has none"
    for name, style in plan.items():
        if style not in STYLES and style != "replicate":
            return f"cannot divide {name}: its plan asks for {style}"
    is_by_heads = any(style == "colwise" and name.endswith(_PROJECTIONS) for name, style in plan.items())
    for name in _HEADS if is_by_heads else ():
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % devices:
            return f"divides heads, and {name} = {heads} cannot be shared evenly by {devices} devices"
    return ""


def refusal_of_folder(folder: Path, devices: int) -> str:
    """Return the same of the published model in a folder."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        return f"cannot read the model: {' '.join(str(error).split())[:200]}"
    return refusal_in_slices(config, devices)


def styles_of(model: Any, devices: int) -> dict[str, str]:
    """Return the style of each divided module of a model, by its name; adapters belong to the layer that they are in.

    Raises:
        BadInput: its class has no plan, or one with a style that is not supported, or its heads do not divide.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        message = f"layout = tensor is for models of transformers, and {type(model).__name__} is none"
        raise BadInput(message, HINT)
    if reason := refusal_in_slices(config, devices):
        raise BadInput(f"layout = tensor {reason}", HINT)
    plan = OF_OURS.get(config.model_type) or model.tp_plan
    styles = {name: STYLES[style] for name, style in _matched(model, plan).items() if style in STYLES}
    owners = _owners(model)
    for name, style in [*styles.items()]:
        if style == "colwise_gather_output":  # a tied embedding has the rows of the output layer
            for owner in owners.get(id(getattr(model.get_submodule(name), "weight", None)), ()):
                if isinstance(model.get_submodule(owner), nn.Embedding):
                    styles[owner] = "embedding_rowwise"
    for name in styles:
        if isinstance(model.get_submodule(name), nn.Embedding) and hasattr(
            model.get_submodule(name), "lora_embedding_A"
        ):
            raise BadInput(f"layout = tensor cannot divide adapters of an embedding ({name})", HINT)
    return styles


def _matched(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module that the plan names.

    Raises:
        BadInput: it names a single weight.
    """
    for name, _ in model.named_parameters():
        if plan.get(_generic(name), "replicate") != "replicate":
            raise BadInput(f"layout = tensor cannot divide {name}: its plan is about a single weight", HINT)
    return {name: plan[_generic(name)] for name, _ in model.named_modules() if _generic(name) in plan}


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of the modules that have each weight."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners
