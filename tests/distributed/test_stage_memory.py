"""The memory of a device that holds a stage of a model: its blocks, and the micro-batches under way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from distributed.planning.memory.memory_model import RUNTIME_BYTES, need_of
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from training.tasks.inputs.model_size import ModelSize, decoder_size

MIB = 2**20
LLAMA = {
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "vocab_size": 16_000,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "tie_word_embeddings": False,
}
"""138 M weights."""


def profile(**options: object) -> Profile:
    return profile_from_options("mine", {"batch_size": 2, "gradient_accumulation": 4, **options})


def need(stage: ModelSize, under_way: int = 1, **options: object) -> int:
    return need_of(profile(**options), stage, alone=True, under_way=under_way).total


@pytest.mark.parametrize(("blocks", "under_way", "measured"), [((0, 5), 3, 784), ((5, 11), 2, 717), ((11, 16), 1, 868)])
def test_a_stage_needs_what_a_control_group_measured(blocks: tuple[int, int], under_way: int, measured: int) -> None:
    """Three processes, 5:6:5 blocks, AdamW, micro-batches of 2 texts of 64 tokens; imports are not counted there."""
    size = decoder_size(LLAMA, 64)
    assert need(size.stage(*blocks), under_way) - RUNTIME_BYTES == pytest.approx(measured * MIB, rel=0.15)


def test_the_stages_of_a_model_hold_each_of_its_parameters_once() -> None:
    size = decoder_size(LLAMA, 64)
    stages = [size.stage(*ends) for ends in pairwise((0, 5, 11, 16))]
    for name in ("parameters", "layers", "activations", "matrices"):
        assert sum(getattr(stage, name) for stage in stages) == getattr(size, name)
    assert [stage.outputs for stage in stages] == [0, 0, size.outputs]
    assert size.stage(0, 16) == size


def test_two_stages_hold_a_tied_embedding_that_one_stage_holds_once() -> None:
    size = decoder_size({**LLAMA, "tie_word_embeddings": True}, 64)
    assert size.parameters == decoder_size(LLAMA, 64).parameters - 16_000 * 768
    assert size.stage(0, 8).parameters + size.stage(8, 16).parameters == size.parameters + 16_000 * 768


def test_blocks_grow_with_what_the_files_hold() -> None:
    size = decoder_size(LLAMA, 64)
    larger = replace(size, parameters=3 * size.parameters)
    assert larger.stage(2, 4).parameters == 3 * size.stage(2, 4).parameters


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_micro_batch_under_way_holds_its_activations(checkpointing: bool) -> None:
    stage = decoder_size(LLAMA, 64).stage(0, 8)
    needs = [need(stage, under_way, gradient_checkpointing=checkpointing) for under_way in (1, 2, 3)]
    (second, third) = (after - before for before, after in pairwise(needs))
    assert abs(third - second) <= 1 and second > 0
    if checkpointing:  # the inputs of blocks only
        assert second < need(stage, 2) / 10
