"""A model of a few blocks and its stages: a language model, or with an encoder before it, as Whisper has one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.layouts.stages.stage import Cut, Departing, TensorSpec
from training.tasks.base import Batch

WORDS, WIDTH, FRAMES = 40, 32, 24


class ToyBlock(nn.Module):
    """Mixes positions, and what an encoder gave."""

    def __init__(self, reads_memory: bool) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, WIDTH) if reads_memory else None
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        inner = self.norm(hidden) + hidden.mean(1, keepdim=True)
        if self.cross is not None and memory is not None:
            inner = inner + self.cross(memory).mean(1, keepdim=True)
        return hidden + torch.tanh(self.inner(inner) + self.lora_b(self.lora_a(inner)))


class ToyModel(nn.Module):
    """The whole model; its stages are copies that hold less."""

    def __init__(self, blocks: int = 6, encoder_blocks: int = 0, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder_blocks, self.checkpointed = encoder_blocks, False
        self.embedding: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(ToyBlock(0 < encoder_blocks <= block) for block in range(blocks))
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        if tied:
            self.head.weight = self.embedding.weight

    def run(self, blocks: range, batch: Batch, arrived: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the loss, or the hidden state and the encoder's output."""
        hidden = arrived[0] if arrived else batch["features"] if self.encoder_blocks else None
        memory = arrived[1] if len(arrived) > 1 else None
        for number in blocks:
            if number == self.encoder_blocks:
                assert self.embedding is not None
                memory, hidden = hidden, self.embedding(batch["words"])
            block = self.blocks[number]
            hidden = (
                checkpoint(block, hidden, memory, use_reentrant=False) if self.checkpointed else block(hidden, memory)
            )
        if blocks.stop == len(self.blocks):
            assert self.head is not None
            return (F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten()),)
        return (hidden,) if memory is None else (hidden, memory.view_as(memory))


class ToyStage:
    """A stage of it, as :class:`training.layouts.stages.stage.StageModel` is."""

    def __init__(self, whole: ToyModel, cut: Cut) -> None:
        self.cut = cut
        self.module = copy.deepcopy(whole)
        self.shared: dict[str, tuple[int, ...]] = {}
        words_stage, last = cut.stage_of(whole.encoder_blocks), cut.stages - 1
        is_tied = whole.head.weight is whole.embedding.weight  # type: ignore[union-attr]
        if is_tied and words_stage != last and cut.stage in (words_stage, last):
            self.shared = {"embedding.weight": (words_stage, last)}
        if cut.stage != words_stage and not (is_tied and cut.is_last):
            self.module.embedding = None
        if not cut.is_last:
            self.module.head = None
        for number in set(range(len(whole.blocks))) - set(cut.blocks):
            self.module.blocks[number] = nn.Identity()

    def arriving(self, batch: Batch) -> tuple[TensorSpec, ...]:
        raise NotImplementedError

    def departing_require_grad(self, arriving: Sequence[bool]) -> tuple[bool, ...]:
        raise NotImplementedError

    def forward(self, batch: Batch, arrived: Sequence[torch.Tensor] = (), seed: int | None = None) -> Any:
        tensors = self.module.run(self.cut.blocks, batch, arrived)
        return tensors[0] if self.cut.is_last else Departing(tensors)


def toy_step(step: int, lengths: Sequence[int] = (9, 12, 7, 12), samples: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of a step, each of its own length."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for length in lengths:
        words = torch.randint(0, WORDS, (samples, length + step + 1), generator=generator)
        labels = words[:, 1:].clone()
        labels[0, length // 2 :] = -100
        features = torch.randn(samples, FRAMES, WIDTH, generator=generator)
        batches.append({"words": words[:, :-1], "labels": labels, "features": features})
    return batches


def weight_of(batch: Batch) -> float:
    """Return the number of words that the loss is a mean over."""
    return float((batch["labels"] != -100).sum())


def toy_loss(model: ToyModel, batch: Batch) -> torch.Tensor:
    """Return the loss that one process computes."""
    return model.run(range(len(model.blocks)), batch, ())[0]


def toy_stages(whole: ToyModel, bounds: tuple[int, ...]) -> list[ToyStage]:
    """Return all stages of a cut."""
    return [ToyStage(whole, Cut(bounds, stage)) for stage in range(len(bounds) - 1)]
