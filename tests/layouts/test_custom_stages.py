"""Models of any class are cut if their blocks hand on one tensor; others are refused with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from profiles.errors import BadInput, RunFailed
from tests.layouts.pipeline_runs import PRECISION, queue_carriers
from training.layouts.messages import TensorHeader, pack_header
from training.layouts.orders import Work
from training.layouts.pipeline import Pipeline
from training.layouts.stages.block_check import examine_own
from training.layouts.stages.cut import CutModel, place_stand_ins
from training.layouts.stages.probe import compare
from training.layouts.stages.stage import Cut, Departing

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return hidden + scale * self.dropout(torch.tanh(self.linear(hidden)))


class Model(nn.Module):
    """Blocks with a position beside them, a head that is the embedding's, and checkpoints around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.after = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(words) + self.position)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(self.after(hidden))

    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        return checkpoint(block, hidden, torch.tensor(0.5), use_reentrant=False)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


BATCH = {name: torch.arange(12).view(3, 4) for name in ("words", "labels")}


def run(model: nn.Module) -> object:
    return loss(model, {name: tensor.to("meta") for name, tensor in BATCH.items()})


def cut(model: nn.Module, *bounds: int) -> list[CutModel]:
    parts = []
    for k in range(len(bounds) - 1):
        part = copy.deepcopy(model)
        place_stand_ins(part, Cut(bounds, k), examine_own(part, run))
        parts.append(CutModel(part, loss))
    return parts


@pytest.mark.slow
def test_a_model_of_any_class_is_cut() -> None:
    torch.manual_seed(0)
    model = Model()
    [whole], parts = cut(model, 0, 6), cut(model, 0, 2, 5, 6)
    compare(whole, parts, BATCH, seed=1)
    assert [len(list(part.module.parameters())) for part in parts] == [8, 7, 8]
    assert parts[1].shared == {"position": (0, 1, 2)}
    assert parts[2].shared == {"embed.weight": (0, 2), "position": (0, 1, 2)}


class PairBlock(Block):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:
        return super().forward(hidden, scale), None


class GivesPairs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock() for _ in range(6))

    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        output, _ = super().call(block, hidden)
        return output


@pytest.mark.slow
def test_blocks_may_give_pairs() -> None:
    torch.manual_seed(0)
    model = GivesPairs()
    compare(*cut(model, 0, 6), cut(model, 0, 2, 5, 6), BATCH, seed=1)


class AsksBlocks(Model):
    """As models do whose blocks have kinds."""

    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        return super().call(block, hidden) if block.linear.weight.shape[0] == block.linear.in_features else hidden


class WritesIntoWords(Model):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        hidden[:, 0] += 1
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(self.after(self.norm(hidden)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AsksBlocks, WritesIntoWords])
def test_a_stand_in_is_asked_and_written_into_as_what_it_stands_for(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind()
    compare(*cut(model, 0, 6), cut(model, 0, 2, 5, 6), BATCH, seed=1)


class WritesIntoItsInput(Block):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu_(hidden))


class HasBlocksThatWrite(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesIntoItsInput() for _ in range(6))

    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        return block(hidden, 1.0)


class ReadsTheEmbeddingAtTheEnd(Model):
    """As heads that are tied without a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def begin(self, words: torch.Tensor) -> torch.Tensor:
        return self.embed(words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.begin(words) + self.position)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.after(hidden) @ self.embed.weight.T


class NeverCallsItsEmbedding(ReadsTheEmbeddingAtTheEnd):
    def begin(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(words, 16).float() @ self.embed.weight


@pytest.mark.slow
@pytest.mark.parametrize("kind", [HasBlocksThatWrite, ReadsTheEmbeddingAtTheEnd, NeverCallsItsEmbedding])
def test_idioms_of_models_are_computed_in_stages(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind()
    parts = cut(model, 0, 2, 5, 6)
    compare(*cut(model, 0, 6), parts, BATCH, seed=1)
    is_tied = kind is not HasBlocksThatWrite
    assert all(part.shared.get("embed.weight") == (0, 2) for part in parts[::2]) or not is_tied


class LooksIntoWords(Model):
    """As transformers' models look into masks, and for padding."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = words.to(words.device, torch.bool)
        scale = 0.5 if mask.all() or 0 in words[:, -1] else float(words.float().mean()) / 10
        hidden = self.norm(self.embed(words) + self.position)
        for block in self.blocks:
            hidden = block(hidden, torch.tensor(scale))
        return self.head(self.after(hidden))


@pytest.mark.slow
def test_a_model_may_look_into_its_inputs() -> None:
    torch.manual_seed(0)
    model = LooksIntoWords()
    compare(*cut(model, 0, 6), cut(model, 0, 2, 5, 6), BATCH, seed=1)


class Skips(Model):
    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        return block(hidden, 1.0) + hidden


class CallsTwice(Model):
    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        return block(block(hidden, 1.0), 1.0)


class NormsBetween(Model):
    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        self.norm(hidden)
        return block(hidden, 1.0)


class LooksAtNumbers(Model):
    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        return block(hidden, float(hidden.mean()))


class HasIdleWeights(Model):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class SumsAllOutputs(Model):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(words) + self.position)
        outputs = [hidden := self.call(block, hidden) for block in self.blocks]
        return self.head(self.after(sum(outputs)))


class AddsWordsAtTheEnd(Model):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = embedded = self.norm(self.embed(words) + self.position)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(self.after(hidden + embedded))


class GivesWordsToAllBlocks(Model):
    """As blocks that are conditioned on a time, a speaker or a picture."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = embedded = self.norm(self.embed(words) + self.position)
        for block in self.blocks:
            hidden = block(hidden, scale=embedded.mean(-1, keepdim=True))
        return self.head(self.after(hidden))


class PenalisesWeights(Model):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words) + sum(weight.square().sum() for weight in self.parameters())


class WritesBetween(Model):
    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        hidden = super().call(block, hidden)
        hidden += 1
        return hidden


class Narrows(Block):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, scale)[:, ::2]


class HalvesTheLength(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrows() for _ in range(6))


class LooksBack(Block):
    """A block with a weight that is a module's elsewhere."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.others = [embed]

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, scale) + self.others[0].weight.mean(0)


class ReadsTheEmbeddingInBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LooksBack(self.embed) for _ in range(6))


class ExpectsNumbers(Model):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        assert not words.is_meta, "a model for real words"
        return super().forward(words)


class HandsOnMappings(Model):
    def call(self, block: nn.Module, hidden: Any) -> Any:
        return block({"hidden": hidden})


class BalancedBlock(Block):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> Any:
        hidden = super().forward(hidden, scale)
        return hidden, hidden.square().mean()


class SumsBalances(Model):
    """As mixtures of experts do, whose blocks may have no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BalancedBlock() for _ in range(6))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, balances = self.norm(self.embed(words) + self.position), []
        for block in self.blocks:
            hidden, balance = block(hidden, torch.tensor(0.5))
            balances += [] if balance is None else [balance]
        return self.head(self.after(hidden)) * sum(balances, start=torch.ones((), device=words.device))


class KeepsStatistics(Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(words) + self.position)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(self.last(self.after(hidden).transpose(1, 2)).transpose(1, 2))


class AsksForLosses(Model):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = super().forward(words)
        return logits + sum(block.balance for block in self.blocks)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (SumsAllOutputs, "what follows its blocks reads more than what the last of them gives"),
        (AddsWordsAtTheEnd, "what follows its blocks reads more than what the last of them gives"),
        (GivesWordsToAllBlocks, "blocks.1 reads more than what the block before it gives"),
        (AsksForLosses, "cannot be followed: 'Block' object has no attribute 'balance'"),
        (PenalisesWeights, "blocks.0.linear.weight is read outside of its block"),
        (WritesBetween, "blocks.1 takes something else than what the block before it gives"),
        (HalvesTheLength, r"blocks.0 gives \[3, 2, 8\] for \[3, 4, 8\], and all blocks are to be of one shape"),
        (ReadsTheEmbeddingInBlocks, "embed.weight is read by blocks.0, which does not have it"),
        (ExpectsNumbers, "its forward cannot be followed: a model for real words"),
        (HandsOnMappings, "blocks.0 takes a dict, and one tensor alone crosses"),
        (SumsBalances, "what follows its blocks reads more than what the last of them gives"),
        (KeepsStatistics, "its buffer last.num_batches_tracked changes after blocks, which not all stages compute"),
        (Skips, "blocks.1 takes something else than what the block before it gives"),
        (CallsTwice, "are not called once each"),
        (NormsBetween, "norm is used neither only before its blocks nor only after them"),
        (LooksAtNumbers, "cannot be followed: Tensor.item"),
        (HasIdleWeights, "idle has weights, and its forward is not called"),
    ],
)
def test_other_models_are_refused(kind: type[Model], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        cut(kind(), 0, 3, 6)


def test_a_cut_for_another_number_of_blocks_is_refused() -> None:
    with pytest.raises(BadInput, match="not for the 6 blocks of Model"):
        cut(Model(), 0, 3, 8)


class DropsBlocks(Model):
    drops = False

    def call(self, block: nn.Module, hidden: torch.Tensor) -> Any:
        return hidden if self.drops else super().call(block, hidden)


def test_blocks_that_are_left_out_by_the_model_are_left_out_by_stages() -> None:
    first, _ = cut(DropsBlocks(), 0, 3, 6)
    first.module.drops = True
    departing = first.forward(BATCH)
    assert isinstance(departing, Departing)
    assert [tensor.shape for tensor in departing.tensors] == [(3, 4, WIDTH)]


def test_a_forward_that_does_not_take_what_arrived_is_an_error() -> None:
    _, second = cut(DropsBlocks(), 0, 3, 6)
    second.module.drops = True
    with pytest.raises(RunFailed, match="stage 2 of 2 of DropsBlocks did not pass through its blocks 3 to 5"):
        second.forward(BATCH, [torch.zeros(3, 4, WIDTH)])


@pytest.mark.parametrize(
    ("shapes", "sent"),
    [([], "nothing"), ([(3, 5, WIDTH)], "[3, 5, 8]"), ([(3, 4, WIDTH)] * 2, "[3, 4, 8], [3, 4, 8]")],
)
def test_another_shape_than_the_batch_has_is_an_error_with_its_machine(shapes: list[Any], sent: str) -> None:
    """As from a machine with other data."""
    _, second = cut(Model(), 0, 3, 6)
    first_carrier, carrier = queue_carriers(2)
    headers = [TensorHeader.of(torch.zeros(shape), None) for shape in shapes]
    first_carrier.send(1, pack_header(Work("forward", 0), headers))
    for header in headers:
        first_carrier.send(1, header.encode(torch.zeros(header.shape)))
    with pytest.raises(RunFailed) as caught:
        Pipeline(second, carrier, PRECISION).passes([BATCH], [1.0], 1.0)
    assert caught.value.message == f"machine-0: it sent tensors of shape {sent} where [3, 4, 8] belongs"
