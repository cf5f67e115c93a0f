"""Devices that each hold a shard of every weight, or a slice of every matrix, make the steps of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from tests.layouts.shard_members import Case, OneProcess, Trained, sharded, trained
from training.layouts.stages.pretrained_stage import redraw_adapters
from training.tasks.pretrained import recompute_activations

pytestmark = pytest.mark.slow


def lora(model: Any) -> None:
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj", "v_proj"]), model)
    redraw_adapters(model, 3)


def drops_layers(model: Any) -> None:
    model.model.encoder.layerdrop = 0.5


def lora_in_pairs(model: Any) -> None:
    """Give adapters to layers that are divided by columns, and to those that are by rows."""
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"]), model)
    redraw_adapters(model, 3)


def recomputed_in_64_bits(model: Any) -> None:
    """Sums in another order than in one process differ by less."""
    recompute_activations(model.double())


def forgets_a_norm(model: Any) -> None:
    plan = {name: style for name, style in model.config.base_model_tp_plan.items() if "q_norm" not in name}
    model.config.base_model_tp_plan = plan


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
    "slices": Case("qwen3", recomputed_in_64_bits, is_sliced=True),
    "slices, biases": Case("neox", is_sliced=True),
    "slices, adapters": Case("llama-tied", lora_in_pairs, is_sliced=True),
    "slices, dropout": Case("whisper", recompute_activations, is_sliced=True, dropout=0.2),
}
FORGETFUL = Case("qwen3", forgets_a_norm, is_sliced=True)
FAILING = Case("whisper", drops_layers, blocks=8)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """By case, what each device has trained, or its error; the failing case is the last."""
    return sharded([*CASES.values(), FORGETFUL, FAILING], tmp_path_factory.mktemp("members"))


def test_layers_dropped_at_random_are_an_error(answers: list[list[Any]]) -> None:
    """They would be put together of different layers."""
    errors = answers[-1]
    assert any("computed different parts" in error or "ExchangeError" in error for error in errors), errors


def test_a_plan_that_would_train_otherwise_is_refused(answers: list[list[Any]]) -> None:
    for error in answers[-2]:
        assert "Qwen3ForCausalLM trains otherwise in slices: the gradient of model.layers.0.self_attn.q_norm" in error


@pytest.mark.parametrize("name", CASES)
def test_its_steps_are_those_of_one_process(name: str, answers: list[list[Any]]) -> None:
    case, devices = CASES[name], dict(zip(CASES, answers))[name]
    expected = trained(OneProcess(), case)
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
