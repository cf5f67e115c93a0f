"""A loss is computed without a question to the device in between, and has the bits that it has with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, WhisperConfig, WhisperForConditionalGeneration, masking_utils

from speech.whisper import task
from speech.whisper.task import WhisperTask
from training.tasks.text import causal_lm
from training.tasks.text.causal_lm import CausalLMTask
from training.tasks.text.packing import unpacked

ROWS = torch.arange(10).view(2, 5)


class Questions(TorchDispatchMode):
    """Counts what the host asks a device for."""

    asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += func._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


def of_text() -> torch.Tensor:
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)).eval()
    return CausalLMTask.loss(None, model, {"input_ids": ROWS, "labels": ROWS})  # type: ignore[arg-type]


def of_speech() -> torch.Tensor:
    torch.manual_seed(1)
    size = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1}
    model = WhisperForConditionalGeneration(WhisperConfig(**size, **heads, suppress_tokens=None)).eval()
    return WhisperTask._loss(model, {"decoder_input_ids": ROWS, "labels": ROWS}, (torch.randn(2, 4, 8),))


@pytest.mark.parametrize("loss", [of_text, of_speech])
def test_a_loss_asks_nothing_and_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, loss: Callable[[], torch.Tensor]
) -> None:
    with Questions() as without:
        ours = loss()
    for module in (causal_lm, task):
        monkeypatch.setattr(module, "unpacked", nullcontext)
    with Questions() as usual:
        assert torch.equal(loss(), ours)
    assert (without.asked, usual.asked) == (0, 1)


def test_whoever_packs_texts_is_asked_as_ever() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with unpacked():
        assert masking_utils.find_packed_sequence_indices(positions) is None
    assert masking_utils.find_packed_sequence_indices(positions).tolist() == [[0, 0, 0, 1, 1]]
