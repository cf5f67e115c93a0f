"""Blocks that leave more than their output to others: no stage would have it of other stages' blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from profiles.errors import BadInput
from tests.layouts.test_custom_stages import BATCH, WIDTH, Block, Model, cut
from training.layouts.stages.probe import compare


class MixesExperts(Block):
    """A block whose experts take the words that a gate chooses, and which keeps a loss that balances them."""

    balance: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        weights, output = self.gate(hidden).softmax(-1), torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            if (chosen := weights.argmax(-1) == number).any():
                output[chosen] = expert(hidden[chosen])
        self.balance = weights.mean((0, 1)).square().sum()
        return super().forward(hidden, scale) + output


class HasExperts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixesExperts() for _ in range(6))


class BalancesExperts(HasExperts):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = super().forward(words)
        return logits * (1 + sum(block.balance for block in self.blocks))


class Remembers(Block):
    def forward(self, hidden: torch.Tensor, scale: Any) -> torch.Tensor:
        output = super().forward(hidden, 1.0) + scale.get("before", 0.0)
        scale["before"] = output.mean(1, keepdim=True)
        return output


class HandsOnMemories(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(6))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, memory = self.norm(self.embed(words) + self.position), dict[str, torch.Tensor]()
        for block in self.blocks:
            hidden = block(hidden, memory)
        return self.head(self.after(hidden))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (BalancesExperts, "the model reads more of blocks.0 than its output, and that alone crosses"),
        (HandsOnMemories, "blocks.1 reads more of blocks.0 than its output, and that alone crosses"),
    ],
)
def test_what_others_read_beside_the_output_of_a_block_is_refused(kind: type[Model], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        cut(kind(), 0, 3, 6)


@pytest.mark.slow
def test_blocks_may_keep_what_nobody_reads() -> None:
    torch.manual_seed(0)
    model = HasExperts()
    compare(*cut(model, 0, 6), cut(model, 0, 2, 5, 6), BATCH, seed=1)
