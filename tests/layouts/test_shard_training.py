"""Devices that each hold a shard of every weight make the steps of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from tests.layouts.shard_members import Case, Trained, sharded, trained
from training.layouts.stages.pretrained_stage import redraw_adapters
from training.layouts.whole import WholeModel
from training.tasks.pretrained import recompute_activations

pytestmark = pytest.mark.slow


def lora(model: Any) -> None:
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj", "v_proj"]), model)
    redraw_adapters(model, 3)


def drops_layers(model: Any) -> None:
    model.model.encoder.layerdrop = 0.5


CASES = {
    "tied": Case("llama-tied"),
    "checkpointed, nesterov": Case(
        "llama-tied", recompute_activations, partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)
    ),
    "whisper": Case("whisper"),
    "whisper adapters": Case("whisper", lora),
    "rows": Case("gpt2", recompute_activations),
    "adapters, offloaded": Case("llama-tied", lora, offloads=True),
    "bf16": Case("llama-tied", dtype=torch.bfloat16),
}
FAILING = Case("whisper", drops_layers, blocks=8)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """By case, what each device has trained, or its error; the failing case is the last."""
    return sharded([*CASES.values(), FAILING], tmp_path_factory.mktemp("members"))


def test_layers_dropped_at_random_are_an_error(answers: list[list[Any]]) -> None:
    """They would be put together of different layers."""
    errors = answers[-1]
    assert any("computed different parts" in error or "ExchangeError" in error for error in errors), errors


@pytest.mark.parametrize("name", CASES)
def test_its_steps_are_those_of_one_process(name: str, answers: list[list[Any]]) -> None:
    case, devices = CASES[name], dict(zip(CASES, answers))[name]
    expected = trained(WholeModel(), case)
    exact = case.dtype is None
    for device in devices:
        assert isinstance(device, Trained), device
        for figures, wanted in zip(device.figures, expected.figures, strict=True):
            assert figures == pytest.approx(wanted, rel=1e-6 if exact else 2e-3)
        assert device.evaluated == pytest.approx(expected.evaluated, rel=1e-6 if exact else 2e-3)
        assert device.weights.keys() == expected.weights.keys()
        for weight, value in device.weights.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected.weights[weight]), rtol=0,
                                       atol=1e-6 if exact else 5e-3, msg=weight)  # fmt: skip
