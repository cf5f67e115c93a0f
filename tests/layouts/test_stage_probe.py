"""The probe finds out whether a small model of a configuration trains in stages as it does whole."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Gemma3TextConfig,
    JambaConfig,
    JambaForCausalLM,
    LlamaForCausalLM,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from profiles.errors import BadInput
from tests.layouts.families import LLAMA, architecture, config
from training.layouts.stages.pretrained_stage import architecture_of
from training.layouts.stages.probe import probe, small_config


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_a_family_passes(family: str) -> None:
    settings = config(family)
    probe(architecture(settings), settings, (0, 3, 8))


@pytest.mark.slow
def test_a_head_whose_inner_layer_is_tied_passes() -> None:
    settings = BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4)
    settings.is_decoder = True
    probe(BertLMHeadModel, settings, (0, 3, 8))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [(T5ForConditionalGeneration, T5Config()), (MoonshineForConditionalGeneration, MoonshineConfig())],
)
def test_an_encoder_decoder_other_than_whisper_is_refused_by_name(architecture: Any, settings: Any) -> None:
    with pytest.raises(BadInput) as caught:
        probe(architecture, settings, (0, 3, 12))
    assert caught.value.message == (
        f"{architecture.__name__} cannot be cut into stages: of encoder-decoders, only a Whisper can"
    )


def test_a_model_of_another_task_is_refused_by_its_type() -> None:
    with pytest.raises(BadInput, match="a model of type 't5' is none that AutoModelForCausalLM makes"):
        architecture_of(AutoModelForCausalLM, T5Config())


def test_a_real_model_that_cannot_be_cut_is_refused_although_a_small_one_can() -> None:
    """Two kinds of blocks, of which the first six are one."""
    settings = JambaConfig(**{**LLAMA, "num_hidden_layers": 8}, num_experts=2, use_mamba_kernels=False)
    with pytest.raises(BadInput, match="no list of blocks of one class"):
        probe(JambaForCausalLM, settings, (0, 2, 8))


def test_a_cut_of_another_model_is_refused_before_a_small_one_is_made() -> None:
    with pytest.raises(BadInput, match=r"the cut \(0, 4, 9\) is not for the 8 blocks of LlamaForCausalLM"):
        probe(LlamaForCausalLM, config("llama"), (0, 4, 9))


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [(0, 32, 64), (0, 10, 40, 64)])
def test_a_whisper_of_any_size_passes(bounds: tuple[int, ...]) -> None:
    settings = WhisperConfig(
        d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20,
        encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128,
    )  # fmt: skip
    probe(WhisperForConditionalGeneration, settings, bounds)


def test_a_small_configuration_has_each_stages_first_and_last_block() -> None:
    kinds = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(26)]
    settings = Gemma3TextConfig(num_hidden_layers=26, layer_types=kinds)
    small, bounds = small_config(settings, (0, 12, 25, 26))
    assert bounds == (0, 2, 4, 5)
    assert small.layer_types == [kinds[index] for index in (0, 11, 12, 24, 25)]
    assert settings.num_hidden_layers == 26


class LooksAtEmbedding(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
    """A model whose every block reads the embedding's weights, which no call shows."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, output: output + self.model.embed_tokens.weight.mean())


@pytest.mark.slow
def test_a_model_that_trains_otherwise_in_stages_is_refused_by_name() -> None:
    with pytest.raises(
        BadInput, match=r"LooksAtEmbedding trains otherwise in 2 stages than whole: .* and \d+ more differ"
    ):
        probe(LooksAtEmbedding, config("llama"), (0, 4, 8))


def test_a_model_without_blocks_is_refused() -> None:
    class NoBlocks(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            self.model.layers = nn.ModuleList([self.model.layers[0]])

    with pytest.raises(BadInput, match="no list of blocks"):
        probe(NoBlocks, config("llama"), (0, 4, 8))
