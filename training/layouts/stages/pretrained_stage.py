"""Stages of transformers models: only what a stage computes is read from the files, or drawn.

The cut is made in the constructor of a subclass, so ``from_pretrained`` itself does all the rest for what is left:
files, renamed keys, tied weights, precision, quantisers, and buffers that no file holds.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from profiles.errors import BadInput
from training.layouts.stages.anatomy import Anatomy, examine
from training.layouts.stages.cut import place_stand_ins
from training.layouts.stages.stage import Cut
from training.numerics.randomness import preserved_generators, seed_with
from training.tasks.pretrained import layer_names
from training.tasks.text.packing import unpacked

_LENGTH = 8
"""Tokens of the forward on the meta device."""
_CPU = torch.device("cpu")


def stage_class(architecture: Any, cut: Cut, seed: int = 0) -> Any:
    """Return a subclass of a transformers model class whose models are one stage.

    ``stage_class(WhisperForConditionalGeneration, cut).from_pretrained(...)`` reads that stage's weights only;
    :func:`build_stage` makes one from a configuration.

    Args:
        architecture: the class of the whole model; see :func:`architecture_of`.
        seed: of weights that no file holds. Each module draws from a generator of its own, by its name, so a stage
            draws what the whole model would.
    """

    class StageClass(architecture):  # type: ignore[misc]  # a class that is known when it runs
        # other stages' weights lie in the same files
        _keys_to_ignore_on_load_unexpected = (".*",)

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            refuse_unknown_encoder(architecture, config)
            with torch.device("meta"):
                super().__init__(config, *args, **kwargs)
            self.constant_weights = [name for name, weight in self.named_parameters() if not weight.requires_grad]
            self.layers_of_all_stages = layer_names(self)
            anatomy = examine(self, _run_on_meta)
            place_stand_ins(self, cut, anatomy)
            self.all_tied_weights_keys: dict[str, str] = {
                target: source
                for target, source in self.all_tied_weights_keys.items()
                if _has_parameter(self, target) and _has_parameter(self, source)
            }

        def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> Any:
            is_cut = all_submodels and hasattr(self, "constant_weights")
            return self.all_tied_weights_keys if is_cut else super().get_expanded_tied_weights_keys(all_submodels)

        def initialize_weights(self) -> None:
            with _drawn_by_name(self, seed):
                super().initialize_weights()

    # files, messages and rules for classes of blocks go by the names
    StageClass.__name__, StageClass.__qualname__ = architecture.__name__, architecture.__qualname__
    StageClass.__module__ = architecture.__module__
    return StageClass


def build_stage(architecture: Any, config: Any, cut: Cut, seed: int = 0) -> nn.Module:
    """Return a stage with random weights in float32, on the CPU; what other stages hold is never made."""
    from transformers.utils import logging  # takes a second

    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the worker has its own display
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would list all weights as missing
    try:
        stage = stage_class(architecture, cut, seed)
        model = stage.from_pretrained(None, config=config, state_dict={}, dtype=torch.float32)
    finally:
        logging.set_verbosity(verbosity)
    for name in model.constant_weights:  # from_pretrained makes Whisper's fixed positions trainable
        if _has_parameter(model, name):
            model.get_parameter(name).requires_grad_(False)
    return cast(nn.Module, model)


def architecture_of(auto: Any, config: Any) -> Any:
    """Return the class of the model that ``auto`` (``AutoModelForCausalLM``) makes for a configuration.

    Raises:
        BadInput: it makes none.
    """
    if type(config) not in auto._model_mapping:
        message = f"a model of type {config.model_type!r} is none that {auto.__name__} makes"
        raise BadInput(message, "choose a model for this task, or train it whole")
    architecture = auto._model_mapping[type(config)]
    return architecture[0] if isinstance(architecture, tuple) else architecture


def refuse_unknown_encoder(architecture: Any, config: Any) -> None:
    """Raise BadInput for an encoder-decoder that is not Whisper's: what its encoder takes is not known."""
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "num_mel_bins"):
        message = f"{architecture.__name__} cannot be cut into stages: of encoder-decoders, only a Whisper can"
        raise BadInput(message, "train it whole, or with a method that needs less memory")


def examine_pretrained(architecture: Any, config: Any) -> Anatomy:
    """Return the anatomy of a transformers model; its weights are never made.

    Raises:
        BadInput: it cannot be cut.
    """
    refuse_unknown_encoder(architecture, config)
    with torch.device("meta"):
        model = architecture(copy.deepcopy(config))
    return examine(model, _run_on_meta)


def _has_parameter(model: nn.Module, name: str) -> bool:
    # not by attributes: a stand-in has those of what it stands for
    return any(name == other for other, _ in model.named_parameters(remove_duplicate=False))


def _run_on_meta(model: Any) -> None:
    config = model.config
    tokens = torch.zeros(1, _LENGTH, dtype=torch.long, device="meta")
    inputs = {"input_ids": tokens}
    if config.is_encoder_decoder:
        frames = 2 * config.max_source_positions
        features = torch.zeros(1, config.num_mel_bins, frames, device="meta", dtype=model.dtype)
        inputs = {"input_features": features, "decoder_input_ids": tokens}
    # a padding token lets GPT-2 look into the words, and a mask would be looked into as well: meta holds no values
    padding, config.pad_token_id = getattr(config, "pad_token_id", None), None
    try:
        with unpacked():
            model(**inputs, use_cache=False)
    finally:
        config.pad_token_id = padding


@contextmanager
def _drawn_by_name(model: nn.Module, seed: int) -> Iterator[None]:
    """Let each module draw its initial weights from a generator that its name seeds."""
    from transformers import PreTrainedModel  # takes a second

    names = {id(module): name for name, module in model.named_modules()}
    submodels = [module for module in model.modules() if isinstance(module, PreTrainedModel)]

    def draw(initialise: Any, module: nn.Module) -> None:
        with drawing(seed, names[id(module)]):
            initialise(module)

    for submodel in submodels:  # each initialises the modules below it
        submodel.__dict__["_init_weights"] = partial(draw, submodel._init_weights)
    try:
        yield
    finally:
        for submodel in submodels:
            del submodel.__dict__["_init_weights"]


@contextmanager
def drawing(seed: int, name: str) -> Iterator[None]:
    """Draw from generators seeded by ``seed`` and ``name``; afterwards the process's generators are as before."""
    with preserved_generators(_CPU):
        seed_with((seed, zlib.crc32(name.encode())), _CPU)
        yield


def redraw_adapters(model: nn.Module, seed: int) -> None:
    """Draw the low-rank adapters of a model anew, by name, so a stage has those that the whole model would have.

    peft draws them in the order of the modules: a stage would begin with those of the first one.
    """
    from peft.tuners.lora import LoraLayer  # takes a second

    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter in layer.active_adapters:
                with drawing(seed, name):
                    layer.reset_lora_parameters(adapter, True)  # type: ignore[no-untyped-call]
