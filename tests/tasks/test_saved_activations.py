"""What a block saves for backward, beside what its module in transformers really saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, WhisperConfig
from transformers import WhisperForConditionalGeneration as Whisper

from speech.inputs.model_size import whisper_size
from training.tasks.inputs.model_size import decoder_size

TOKENS, POSITIONS = 48, 64
SHAPE = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 8, "num_key_value_heads": 4,
         "vocab_size": 64, "max_position_embeddings": POSITIONS, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
HEADS = {"head_dim": 16}
EVERY_HEAD = {"num_key_value_heads": 8}
GPT2 = {"n_inner": 176, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **EVERY_HEAD}
KINDS = {"llama": {}, "mistral": {}, "qwen2": {}, "qwen3": HEADS, "gemma": HEADS, "gemma3_text": HEADS, "phi3": {},
         "olmo2": {}, "smollm3": {}, "granite": {}, "gpt2": GPT2, "gpt_neox": EVERY_HEAD}  # fmt: skip


def saved(model: PreTrainedModel, **inputs: torch.Tensor) -> float:
    """Return how many numbers of 4 bytes the model's forward saves for backward, besides weights and buffers."""
    constant = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constant:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.train()(**inputs)
    return sum(storage.nbytes() for storage in storages.values()) / 4


def of_one_block(build: Callable[[int], float]) -> float:
    """Return what a block adds, from models of two and of three blocks."""
    return build(3) - build(2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoders_block_saves_what_is_expected_of_its_kind(kind: str) -> None:
    def config(layers: int) -> PretrainedConfig:
        shape: dict[str, Any] = {**SHAPE, "num_hidden_layers": layers, **KINDS[kind]}
        return AutoConfig.for_model(kind, **shape)

    def build(layers: int) -> float:
        tokens = torch.randint(0, 64, (1, TOKENS))
        model = AutoModelForCausalLM.from_config(config(layers), attn_implementation="sdpa")
        return saved(model, input_ids=tokens, labels=tokens)

    expected = decoder_size(config(2).to_dict(), TOKENS).blocks[0].activations
    assert expected == pytest.approx(of_one_block(build), rel=0.12)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_whispers_block_saves_what_is_expected(part: str) -> None:
    def config(layers: int) -> WhisperConfig:
        shape = {f"{side}_{name}": value for side in ("encoder", "decoder")
                 for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 160))}  # fmt: skip
        shape[f"{part}_layers"] = layers
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        lengths = {"max_source_positions": 50, "max_target_positions": TOKENS}
        return WhisperConfig(d_model=64, vocab_size=64, num_mel_bins=8, **lengths, **shape, **ids)

    def build(layers: int) -> float:
        texts = torch.randint(0, 64, (1, TOKENS))
        return saved(Whisper(config(layers)), input_features=torch.randn(1, 8, 100), labels=texts)

    block = whisper_size(config(2).to_dict()).blocks[1 if part == "encoder" else -2]
    assert block.in_encoder == (part == "encoder")
    assert block.activations == pytest.approx(of_one_block(build), rel=0.12)
