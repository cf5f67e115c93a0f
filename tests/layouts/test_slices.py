"""Which matrices of a model are divided over devices, and what their layers draw and have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig

from profiles.errors import BadInput
from tests.layouts.families import config, plain_model
from training.layouts.inside.slices import _Region
from training.layouts.inside.tensor_plans import refusal_in_slices, styles_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "devices", "reason"),
    [
        ("gpt2", 2, "gpt2 has none"),
        ("llama", 4, "num_key_value_heads = 2 cannot be shared evenly by 4 devices"),
        ("whisper", 3, "encoder_attention_heads = 4 cannot be shared evenly by 3 devices"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(family: str, devices: int, reason: str) -> None:
    assert reason in refusal_in_slices(config(family), devices)


def test_experts_are_refused() -> None:
    assert "its plan asks for" in refusal_in_slices(MixtralConfig(), 2)


def test_a_module_without_a_configuration_is_refused() -> None:
    with pytest.raises(BadInput, match="layout = tensor is for models of transformers, and Linear is none"):
        styles_of(nn.Linear(2, 2), 2)


def test_an_embedding_has_the_rows_of_the_output_layer_that_it_is_tied_to() -> None:
    styles = styles_of(plain_model(config("llama-tied")), 2)
    assert (styles["model.embed_tokens"], styles["lm_head"]) == ("embedding_rowwise", "colwise_gather_output")
    assert "model.norm" not in styles


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "granite", "neox", "whisper"])
def test_all_matrices_of_blocks_are_divided(family: str) -> None:
    model: Any = plain_model(config(family))
    styles = styles_of(model, 2)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name}
    assert linear <= styles.keys()


def test_devices_draw_other_numbers_between_divided_layers_and_the_same_behind() -> None:
    """The first ones by the layer, and again the same where a block is recomputed."""
    drawn: dict[int, list[float]] = {}
    for rank in (0, 1):
        torch.manual_seed(0)
        region = _Region(None, rank, CPU, True)
        numbers = drawn[rank] = []
        for name in ("block.0", "block.1", "block.1"):
            region.enter(name, nn.Identity(), (torch.ones(1),))
            numbers.append(float(torch.rand(())))
            region.leave()
        numbers.append(float(torch.rand(())))
    torch.manual_seed(0)
    assert drawn[0][3] == drawn[1][3] == float(torch.rand(()))
    assert len({*drawn[0][:3], *drawn[1][:3]}) == 4
    assert drawn[0][1] == drawn[0][2]


def test_what_a_recomputed_block_has_left_is_forgotten() -> None:
    torch.manual_seed(0)
    region = _Region(None, 0, CPU, True)
    region.enter("block.1.mlp", nn.Identity(), (torch.ones(1),))
    torch.manual_seed(7)  # as checkpointing sets the generators behind a recomputation that it breaks off
    region.enter("block.0.attention", nn.Identity(), (torch.ones(1),))
    region.leave()
    number = float(torch.rand(()))
    torch.manual_seed(7)
    assert number == float(torch.rand(()))
