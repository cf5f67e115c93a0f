"""A small GPT and its text, for the loops beside it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

TEXT = Path(__file__).parents[1] / "nanogpt" / "input.txt"


class SmallGPT(nn.Module):
    """A decoder over bytes; its forward returns logits and, with targets, the loss, as nanoGPT's does."""

    def __init__(self, width: int = 64, layers: int = 2, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, index: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(index.shape[1], device=index.device)
        hidden = self.tokens(index) + self.positions.weight[: index.shape[1]]
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the text: nine tenths to train on, the rest to validate."""
    text = TEXT if TEXT.is_file() else Path(__file__)  # another machine has this folder alone
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
