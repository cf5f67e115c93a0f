"""Language models of one layer, whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tasks.tiny_tasks import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_model(folder: Path, template: str = "", positions: int = 128, seed: int = 0) -> Path:
    """Save a random model."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(template)
    if template:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=260, max_position_embeddings=positions, eos_token_id=256, bos_token_id=257, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
