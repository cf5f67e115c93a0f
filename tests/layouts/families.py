"""Tiny models of the families that are cut into stages, and padded batches for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    WhisperConfig,
)

from training.layouts.stages.cut import CutModel
from training.layouts.stages.pretrained_stage import architecture_of, build_stage
from training.layouts.stages.stage import Cut

WORDS, BLOCKS, LENGTH = 61, 8, 12
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
WINDOWED = LLAMA | {"head_dim": 8, "sliding_window": 4}
GPT2 = {
    "vocab_size": WORDS, "n_embd": 32, "n_layer": BLOCKS, "n_head": 4, "n_positions": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WHISPER = {
    "vocab_size": WORDS, "num_mel_bins": 8, "encoder_layers": 4, "decoder_layers": 4, "d_model": 32,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_source_positions": 10, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def config(family: str, dropout: float = 0.0) -> Any:
    """Return the configuration of a family with 8 blocks."""
    match family:
        case "llama":
            return LlamaConfig(**LLAMA, tie_word_embeddings=False)
        case "llama-tied":
            return LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_dropout=dropout)
        case "qwen2":
            return Qwen2Config(**LLAMA, tie_word_embeddings=True)
        case "qwen3":
            return Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=True)
        case "mistral":
            return MistralConfig(**LLAMA, sliding_window=4)
        case "gemma":
            return GemmaConfig(**LLAMA, head_dim=8)
        case "gemma2":
            return Gemma2Config(**WINDOWED)
        case "gemma3":
            return Gemma3TextConfig(**WINDOWED)
        case "granite":
            return GraniteConfig(**LLAMA, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22)
        case "gpt2":
            return GPT2Config(**GPT2, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
        case "neox":
            return GPTNeoXConfig(**SIZES, attention_dropout=0.0, hidden_dropout=0.0)
        case "whisper":
            return WhisperConfig(**WHISPER, dropout=dropout)
    raise KeyError(family)


def shallow(family: str, blocks: int) -> Any:
    """Return the configuration of a family with so many blocks; an encoder has half of them."""
    settings = config(family)
    settings.num_hidden_layers = blocks
    if settings.is_encoder_decoder:
        settings.encoder_layers = settings.decoder_layers = settings.num_hidden_layers = blocks // 2
    return settings


FAMILIES = (
    "llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "granite", "gpt2", "neox",
    "whisper",
)  # fmt: skip


def architecture(settings: Any) -> Any:
    """Return the class of a configuration's model."""
    return architecture_of(AutoModelForSpeechSeq2Seq if settings.is_encoder_decoder else AutoModelForCausalLM, settings)


def batch(settings: Any, seed: int = 0, size: int = 3, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return a batch of padded sequences, for Whisper with sounds."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, WORDS, (size, length + 1), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (size,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    labels = words[:, 1:].masked_fill(mask == 0, -100)
    words = words[:, :-1] * mask
    if settings.is_encoder_decoder:
        features = torch.randn(size, 8, 20, generator=generator)
        return {
            "input_features": features, "decoder_input_ids": words, "decoder_attention_mask": mask, "labels": labels
        }  # fmt: skip
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def loss(model: nn.Module, samples: Any) -> torch.Tensor:
    """Return the mean loss of a batch's words."""
    inputs = {name: tensor for name, tensor in samples.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten(), ignore_index=-100)


def stages(settings: Any, *bounds: int) -> list[CutModel]:
    """Return all stages of a cut, with the weights of the whole model."""
    models = (build_stage(architecture(settings), settings, Cut(bounds, k)) for k in range(len(bounds) - 1))
    return [CutModel(model.train(), loss) for model in models]


def plain_model(settings: Any) -> nn.Module:
    """Return the model as transformers makes it, with the weights of :func:`stages`."""
    blocks = settings.num_hidden_layers * (2 if settings.is_encoder_decoder else 1)
    [whole] = stages(settings, 0, blocks)  # the state's names are those of the whole model, or they do not load
    model: nn.Module = architecture(settings)._from_config(settings, dtype=torch.float32)
    model.load_state_dict(whole.module.state_dict())
    return model.train()
