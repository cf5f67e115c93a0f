"""Pipelines of transformers models, as :mod:`training.layouts.stages.cut` cuts them, make the steps of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.layouts.families import BLOCKS, batch, config, loss, plain_model, stages
from tests.layouts.pipeline_runs import agree, pipeline_run, whole_run
from training.layouts.stages.pretrained_stage import redraw_adapters
from training.layouts.stages.stage import StageModel
from training.tasks.pretrained import recompute_activations

pytestmark = pytest.mark.slow

BOUNDS = (0, 2, 5, BLOCKS)
Prepare = Callable[[Any], None]


def _step(settings: Any, step: int) -> list[dict[str, torch.Tensor]]:
    return [batch(settings, 10 * step + index, 2, length) for index, length in enumerate((12, 9, 14, 11))]


def _lora(model: Any) -> None:
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model)
    redraw_adapters(model, 3)


def _frozen_encoder(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".encoder." in name:
            parameter.requires_grad_(False)


def _as_it_is(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize(
    ("family", "prepare"),
    [
        ("llama-tied", _as_it_is),
        ("llama-tied", _lora),
        ("llama-tied", recompute_activations),
        ("whisper", _as_it_is),
        ("whisper", _lora),
        ("whisper", recompute_activations),
        ("whisper", _frozen_encoder),
    ],
)
def test_its_steps_are_those_of_one_process(family: str, prepare: Prepare) -> None:
    settings = config(family)
    parts, model = stages(settings, *BOUNDS), plain_model(settings)
    for module in (*(part.module for part in parts), model):
        prepare(module)
    make_step = partial(_step, settings)
    agree(pipeline_run(parts, make_step)[0], whole_run(model, loss, make_step))


class _TakesTurns:
    """A stage whose forwards are not beside another's: threads of one process draw from one generator."""

    lock = threading.Lock()

    def __init__(self, stage: StageModel) -> None:
        self.cut, self.module, self.shared, self._stage = stage.cut, stage.module, stage.shared, stage

    def forward(self, *arguments: Any) -> Any:
        with self.lock:
            return self._stage.forward(*arguments)


@pytest.mark.parametrize("family", ["llama-tied", "whisper"])
def test_dropout_is_that_of_one_stage(family: str) -> None:
    settings = config(family, dropout=0.2)
    make_step = partial(_step, settings)
    whole, _ = pipeline_run(stages(settings, 0, BLOCKS), make_step)
    parts: list[Any] = [_TakesTurns(stage) for stage in stages(settings, *BOUNDS)]
    agree(pipeline_run(parts, make_step)[0], whole[0])
