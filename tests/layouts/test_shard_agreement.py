"""What devices that hold shards must compute alike, and models that they refuse because they would not."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from profiles.errors import BadInput
from tests.layouts.pipeline_runs import queue_carriers, side_by_side
from training.layouts.carrier import Carrier
from training.layouts.inside.agreement import ForwardRecord, refuse_gradient_hooks
from training.layouts.inside.inside_model import cause_of
from training.layouts.inside.sharded import ShardedModel
from training.layouts.inside.shards import _units
from training.layouts.inside.world import World

WIDTH = 4


class ChoosesExperts(nn.Module):
    """A block whose expert the samples choose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.experts[int(hidden.detach().sum() > 0)](hidden)


class Collects(nn.Linear):
    """A block that adds what it computes to a list that it is given."""

    def forward(self, hidden: torch.Tensor, collected: Any = ()) -> torch.Tensor:
        hidden = super().forward(hidden)
        if isinstance(collected, list):
            collected.append(hidden.mean())
        return hidden


class Counts(nn.Linear):
    """A block that counts the passes that it has seen."""

    def __init__(self, is_saved: bool = True, is_made_anew: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()), is_saved)
        self.is_made_anew = is_made_anew

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_made_anew:
            self.count = self.count + 1
        else:
            self.count += 1
        return super().forward(hidden)


class Shown(ShardedModel):
    """A device whose task is asked for a sample; ``is_late`` by its own clock."""

    def __init__(self, carrier: Carrier, is_late: bool) -> None:
        super().__init__(World(carrier, cast(Any, None)), 1)
        task = SimpleNamespace(sample_output=lambda model, batch: task.on_any_device(is_late))
        self._task = cast(Any, task)

    def compute(self, function: Any) -> Any:
        return function(nn.Identity())


def record_of(*blocks: nn.Module) -> tuple[Any, ForwardRecord]:
    model = nn.ModuleList(blocks)
    return model, ForwardRecord(model, [*blocks])


def checksum_of(sample: float) -> int:
    (block,), record = record_of(ChoosesExperts())
    record.begin_pass()
    block(torch.full((1, WIDTH), sample))
    return record.checksum()


def test_devices_that_use_other_weights_differ() -> None:
    assert checksum_of(1.0) == checksum_of(2.0) != checksum_of(-1.0)


def test_what_one_device_used_in_another_pass_differs() -> None:
    sums = []
    for samples in ((1.0, -1.0), (-1.0, 1.0)):
        (block,), record = record_of(ChoosesExperts())
        for sample in samples:
            record.begin_pass()
            block(torch.full((1, WIDTH), sample))
        sums.append(record.checksum())
    assert sums[0] != sums[1]


@pytest.mark.parametrize(
    ("block", "is_refused"),
    [(Counts(), True), (Counts(False), True), (Counts(True, True), True), (Counts(False, True), False)],
)
def test_buffers_that_change_are_refused_unless_they_are_tables(block: Counts, is_refused: bool) -> None:
    _, record = record_of(block)
    record.begin_pass()
    block(torch.ones(1, WIDTH))
    if not is_refused:
        record.checksum()
        return
    with pytest.raises(BadInput, match=r"the buffer 0\.count changes in training"):
        record.checksum()


def test_a_block_that_changes_a_list_is_refused() -> None:
    (block,), _ = record_of(Collects(WIDTH, WIDTH))
    block(torch.ones(1, WIDTH), (torch.ones(1), [torch.ones(1)]))
    with pytest.raises(BadInput, match="changes a list or a dict that it is given"):
        block(torch.ones(1, WIDTH), [])


def test_a_hook_on_a_gradient_is_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    refuse_gradient_hooks(model, "shard")
    model.weight.register_hook(torch.neg)
    with pytest.raises(BadInput, match="weight has a hook on its gradient"):
        refuse_gradient_hooks(model, "shard")


def test_blocks_that_share_weights_with_another_are_no_units() -> None:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(5)]
    blocks[1][0] = blocks[0][0]
    blocks[3][0].weight = blocks[2][0].weight
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    assert _units(model) == [blocks[4]]
    model.blocks = nn.ModuleList([blocks[4]] * 3)
    assert _units(model) == []


def test_a_weight_that_is_read_outside_of_its_block_is_said() -> None:
    error = cause_of(RuntimeError("aten.mul.Tensor got mixed torch.Tensor and DTensor"))
    assert isinstance(error, BadInput) and "weights of a block are read outside" in error.message


def test_devices_end_a_shown_text_together() -> None:
    """One that is late by its own clock would leave the others in an exchange."""
    devices = [Shown(carrier, is_late) for carrier, is_late in zip(queue_carriers(2), (False, True), strict=True)]
    assert side_by_side([partial(device.sample_output, cast(Any, {})) for device in devices]) == [True, True]
