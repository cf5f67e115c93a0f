"""Transformers models: load from a folder or the hub with actionable errors, LoRA, checkpointing, and saving.

Low-rank adapters use peft (Hu et al. 2021, arXiv:2106.09685): W' = W + (alpha / rank) B A. For the precision of the
frozen weights below them see :mod:`training.tasks.frozen_base`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from profiles.errors import BadInput
from profiles.locations import check_model_path, is_pointer, pointer_error
from profiles.options import hint_for
from profiles.schema import ModelSettings
from training.tasks.file_mapping import map_to_file

T = TypeVar("T")

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_HOW_TO_OPEN = """\
# Adapter

This folder holds LoRA adapters for `{base}`, not a whole model. Open it with

    from peft import PeftModel
    model = PeftModel.from_pretrained(BASE_MODEL, "THIS_FOLDER").merge_and_unload()

or train with `lora_merge = true` to get a folder that opens by itself.
"""


@contextlib.contextmanager
def only_errors(name: str) -> Iterator[None]:
    """Suppress the warnings of a library's logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def adapter_folder(path: str) -> Path | None:
    """Return the folder ``path`` if it holds only adapters, not a full model."""
    if not check_model_path(path):
        return None
    folder = Path(path).expanduser()
    return None if (folder / "config.json").is_file() else folder


def base_of(adapter: Path) -> str:
    """Return the base model of adapters.

    Raises:
        BadInput: their folder does not name it.
    """
    try:
        return str(json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"model {adapter}: adapter_config.json names no base model", "save the adapter again") from error


def is_hub_reachable() -> bool:
    """Whether the hub's name resolves, or a proxy is set. The hub's own client takes 23 s to find out."""
    if any(os.environ.get(name) for name in PROXIES):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def read_checked(path: str, kind: str, read: Callable[[bool], T]) -> T:
    """Call ``read(local_files_only)`` and turn its errors into a one-line message.

    Args:
        path: the model's folder or hub name.
        kind: what is read, for the message ("model", "tokenizer").

    Raises:
        BadInput: not found, not readable, or of another kind.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]  # the worker has its own display
    local = check_model_path(path)
    online = not local and is_hub_reachable()
    try:
        return read(not online)
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError, SafetensorError) as error:
        # from_pretrained raises these for unknown names and damaged folders
        raise _read_error(path, kind, local, online, error) from error


def from_pretrained(kind: Any, path: str, title: str) -> Any:
    """Return ``kind.from_pretrained(path)``, see :func:`read_checked`."""
    return read_checked(path, title, lambda local: kind.from_pretrained(path, local_files_only=local))


def _read_error(path: str, kind: str, local: bool, online: bool, error: Exception) -> BadInput:
    reason = " ".join(str(error).split())[:200]
    if pointer := next(filter(is_pointer, Path(path).expanduser().glob("*")), None) if local else None:
        return pointer_error(pointer)
    if local:
        return BadInput(f"{kind} {path} cannot be read: {reason}", "name the folder of a saved model")
    if not online:
        message = f"{kind} {path}: no such folder, and the hub cannot be reached to look it up"
        alone = "; without it, profile whisper-scratch trains from scratch on clips of up to 30 s"
        hint = "check the name, connect to the network, or use a folder"
        return BadInput(message, hint + (alone if "whisper" in path.lower() else ""))
    if "gated" in reason or "401" in reason or "403" in reason:
        return BadInput(f"{kind} {path}: the hub does not let you read it", "log in with 'hf auth login'")
    return BadInput(f"{kind} {path} not found on the hub: {reason}", "check the name or use a folder")


def read_weights(auto: Any, path: str, as_stored: bool = False) -> Any:
    """Return the model that ``auto.from_pretrained`` reads from ``path``, on the CPU and in float32.

    Args:
        as_stored: keep the file's precision, so that weights stay memory-mapped.

    Raises:
        BadInput: its weights are missing, damaged or incomplete.
    """

    def read(local: bool) -> Any:
        dtype = "auto" if as_stored else torch.float32
        model, info = auto.from_pretrained(path, local_files_only=local, dtype=dtype, output_loading_info=True)
        missing = sorted(info["missing_keys"])
        if missing:
            hint = "name the folder of a complete model, or set from_scratch"
            raise BadInput(f"model {path}: its weights lack {missing[0]} and {len(missing) - 1} more", hint)
        return model

    return read_checked(path, "model", read)


def read_with_adapters(auto: Any, path: str, as_stored: bool = False) -> Any:
    """Like :func:`read_weights`; adapters are merged into their base model.

    Raises:
        BadInput: as :func:`read_weights`, or the adapters cannot be read.
    """
    adapter = adapter_folder(path)
    if adapter is None:
        return read_weights(auto, path, as_stored)
    base = read_weights(auto, base_of(adapter))
    return read_checked(path, "adapter", lambda local: read_adapter(base, adapter))


def recompute_activations(model: Any) -> None:
    """Enable activation checkpointing in a transformers model, also if its weights are frozen.

    The non-reentrant form preserves the random state of dropout and needs no input with a gradient.
    """
    # transformers renamed the method within version 5; the first argument is the same
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.enable_input_require_grads()


def add_lora(
    model: PreTrainedModel, settings: ModelSettings, all_linear: tuple[str, ...], exclude: str | None = None
) -> PeftModel:
    """Freeze ``model`` and add adapters to it; none to a stage that has none of these layers.

    Args:
        all_linear: targets of ``lora_target_modules = all-linear``; empty: every linear layer but the output.
        exclude: regular expression of full module names that get no adapter.

    Raises:
        BadInput: a target is not a linear layer of the model, and the message lists the layers; or its adapters could
            not be merged.
    """
    targets = requested = _lora_targets(model, settings.lora_target_modules, all_linear)
    if isinstance(requested, list):
        _refuse_tied(model, requested, settings)
        chosen = (name for name in _linear_layers(model) if name.rpartition(".")[2] in requested)
        # whole names, as a stage has modules of other kinds where another one has the layers
        targets = [name for name in chosen if not (exclude and re.fullmatch(exclude, name))] or DUMMY_TARGET_MODULES
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        exclude_modules=None if isinstance(requested, list) else exclude,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        bias="none",
    )
    config.base_model_name_or_path = settings.model_path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
        adapted = cast(PeftModel, get_peft_model(model, config))
    if isinstance(requested, list):  # what is saved is about the whole model, of which this may be a stage
        saved = cast(LoraConfig, adapted.peft_config["default"])
        saved.target_modules, saved.exclude_modules = cast(Any, set(requested)), exclude  # as peft has them
    return adapted


def read_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return ``model`` with the adapters of ``folder`` merged into its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return cast(PreTrainedModel, PeftModel.from_pretrained(model, str(folder)).merge_and_unload())


def _refuse_tied(model: PreTrainedModel, targets: list[str], settings: ModelSettings) -> None:
    """Raise BadInput if a target's weight is the embedding's too: merged, its adapters would be lost or change both."""
    tied = {weight.split(".")[-2] for weight in (model.all_tied_weights_keys or {}) if "." in weight}
    if settings.lora_merge and (shared := sorted(tied.intersection(targets))):
        message = f"lora_target_modules: {shared[0]} has the weight of the embedding, so its adapters cannot be merged"
        raise BadInput(message, f"leave {shared[0]} out, or set lora_merge = false")


def layer_names(model: nn.Module) -> list[str]:
    """Return the last names of all linear layers of a model."""
    return sorted({name.rpartition(".")[2] for name in _linear_layers(model)})


def _linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def _lora_targets(model: nn.Module, setting: str, all_linear: tuple[str, ...]) -> list[str] | str:
    if setting.strip() == "all-linear":
        return list(all_linear) or "all-linear"
    names = [name.strip() for name in setting.split(",") if name.strip()]
    known_layers = getattr(model, "layers_of_all_stages", None) or layer_names(model)
    for name in names or [""]:
        if name not in known_layers:
            hint = hint_for(name, known_layers, "choose among them, or 'all-linear'")
            raise BadInput(
                f"lora_target_modules: no layer {name!r} in the model; it has: {', '.join(known_layers)}", hint
            )
    return names


def merged_copy(model: PeftModel, read_base: Callable[[], PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Return a copy of the base model with the adapters merged into its weights, on the CPU.

    Merged weights are mapped to temporary files, as a second copy of a large model may not fit into memory. All other
    weights are shared with the live model if it is on the CPU.

    Args:
        read_base: reads the base model; called if the live one holds weights in lower precision.
        folder: for the temporary files, which are unlinked at once.
    """
    base = cast(PreTrainedModel, model.get_base_model())
    if any(parameter.dtype != torch.float32 for parameter in base.parameters()):
        fresh = read_base()
        adapted = {f"{name}.weight": layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
        for name, parameter in fresh.named_parameters():
            parameter.data = map_to_file(parameter.detach().float(), folder)
            if name in adapted:
                _add_adapters(parameter.data, adapted[name])
        fresh.config.dtype = torch.float32
        return fresh
    with torch.device("meta"):
        fresh = type(base)(base.config)
    fresh.load_state_dict(_merged_weights(base, folder), strict=False, assign=True)
    fresh.tie_weights()
    fresh.generation_config = base.generation_config
    return fresh


def _merged_weights(base: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        weight = tensor.detach().cpu()
        if owner and leaf == "weight":
            weight = map_to_file(weight, folder)
            _add_adapters(weight, adapted[owner])
        weights[f"{owner}.{leaf}" if owner else name] = weight
    return weights


def _add_adapters(weight: torch.Tensor, layer: Any) -> None:
    """Merge a layer's adapters into its weight on the CPU, in place.

    Temporary tensors would fragment the heap by as much as all merged weights together.
    """
    for adapter in layer.active_adapters:
        down, up = (matrices[adapter].weight.detach().cpu() for matrices in (layer.lora_A, layer.lora_B))
        target = weight.T if getattr(layer, "fan_in_fan_out", False) else weight
        target.addmm_(up.to(weight.dtype), down.to(weight.dtype), alpha=layer.scaling[adapter])


def save_weights(model: Any, directory: Path, read_base: Callable[[], PreTrainedModel], merge: bool) -> None:
    """Save a model: with adapters merged, see :func:`merged_copy`, or only the adapters with a README."""
    if isinstance(model, PeftModel) and not merge:
        model.save_pretrained(str(directory))
        base = model.peft_config["default"].base_model_name_or_path
        (directory / "README.md").write_text(_HOW_TO_OPEN.format(base=base), encoding="utf-8")
        return
    merged = merged_copy(model, read_base, directory.parent) if isinstance(model, PeftModel) else model
    merged.save_pretrained(str(directory))
