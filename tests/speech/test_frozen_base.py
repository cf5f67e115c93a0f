"""Weights below adapters in bf16: the same bits under autocast, and saved models as if they had been in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_speech import Prepared
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from profiles.errors import BadInput
from profiles.schema import ModelSettings
from speech.whisper.model import unwrap
from training.hardware.device import Precision
from training.tasks.frozen_base import with_frozen_base
from training.tasks.pretrained import add_lora, recompute_activations

CPU = torch.device("cpu")
BF16, FP32 = Precision(torch.bfloat16, CPU), Precision(None, CPU)


def lora(**options: Any) -> ModelSettings:
    return ModelSettings(model_path="x", tuning="lora", lora_rank=2, lora_dropout=0.0, **options)


def step(model: nn.Module, loss: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss and the gradients of the adapters under autocast."""
    with BF16.autocast():
        value = loss(model)
    value.backward()
    return value.detach(), [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]


def assert_same_step(plain: nn.Module, small: nn.Module, loss: Any) -> None:
    one, other = step(plain, loss), step(small, loss)
    assert torch.equal(one[0], other[0]) and len(one[1]) == len(other[1]) > 0
    assert all(map(torch.equal, one[1], other[1]))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_whisper_step_gives_the_same_bits(prepared: Prepared, checkpointing: bool) -> None:
    task = prepared(tuning="lora", lora_rank=2, lora_dropout=0.0, gradient_checkpointing=checkpointing)
    torch.manual_seed(0)
    plain = task.build_model()
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    small = with_frozen_base(copy.deepcopy(plain), lora(), BF16)
    layer = unwrap(small).model.decoder.layers[0]
    assert layer.fc1.base_layer.weight.dtype == torch.bfloat16
    assert {unwrap(small).proj_out.weight.dtype, layer.fc1.lora_A["default"].weight.dtype} == {torch.float32}
    batch = task.collate([task.train[0], task.train[1]], [])
    assert_same_step(plain.train(), small.train(), lambda model: task.loss(model, copy.deepcopy(batch)))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_language_model_step_gives_the_same_bits(kind: str) -> None:
    llama = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    gpt2 = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    base: Any = LlamaForCausalLM(llama) if kind == "llama" else GPT2LMHeadModel(gpt2)
    base.name_or_path = "x"
    recompute_activations(base)
    plain = add_lora(base, lora(), ()).train()
    small = with_frozen_base(copy.deepcopy(plain), lora(), BF16)
    assert any(parameter.dtype == torch.bfloat16 for parameter in small.parameters())
    ids = torch.arange(24).view(2, 12)
    assert_same_step(plain, small, lambda model: model(input_ids=ids).logits.float().logsumexp(-1).mean())


@pytest.mark.slow
def test_the_saved_model_is_as_if_the_base_had_been_in_float32(prepared: Prepared, tmp_path: Path) -> None:
    task = prepared(tuning="lora", lora_rank=2)
    model = task.build_model()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    saved = []
    for name, held in {"plain": model, "small": with_frozen_base(copy.deepcopy(model), lora(), BF16)}.items():
        (tmp_path / name).mkdir()
        task.save(held, tmp_path / name)
        saved.append((tmp_path / name / "model.safetensors").read_bytes())
    assert saved[0] == saved[1]


@pytest.mark.parametrize(("asked", "precision"), [("auto", FP32), ("fp32", BF16)])
def test_elsewhere_weights_stay_as_they_are(asked: str, precision: Precision) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.requires_grad_(False)
    with_frozen_base(model, lora(base_precision=asked), precision)
    assert model[0].weight.dtype == torch.float32
    with_frozen_base(model, ModelSettings(model_path="x"), BF16)  # all weights are trained
    assert model[0].weight.dtype == torch.float32


def test_bf16_is_refused_where_steps_compute_in_float32() -> None:
    with pytest.raises(BadInput, match="base_precision = bf16: steps on cpu compute in float32 here"):
        with_frozen_base(nn.Linear(2, 2), lora(base_precision="bf16"), FP32)


def test_a_device_that_the_library_does_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = type("library", (), {"supported_torch_devices": {"cuda"}})
    monkeypatch.setattr("training.tasks.frozen_base._bitsandbytes", lambda precision: library)
    with pytest.raises(BadInput, match="nf4: bitsandbytes does not work on cpu"):
        with_frozen_base(nn.Linear(2, 2), lora(base_precision="nf4"), BF16)
