"""Texts that stages generate together are those of one process, token for token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.layouts.families import BLOCKS, LENGTH, WORDS, architecture, config
from tests.layouts.pipeline_runs import PRECISION, QueueCarrier, queue_carriers, side_by_side
from training.layouts.decode import generating
from training.layouts.stages.pretrained_stage import build_stage
from training.layouts.stages.stage import Cut


def written(model: Any) -> torch.Tensor:
    words = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [4]])).long()
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8, "max_time": 60.0, "pad_token_id": 0}
    tokens: torch.Tensor = model.eval().generate(input_ids=words, **options)
    return tokens


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "neox", "qwen3"])
def test_stages_write_the_tokens_of_one_process(family: str) -> None:
    settings = config(family)
    settings.initializer_range = 0.5  # texts that do not repeat one token
    make = partial(build_stage, architecture(settings), settings)

    def write(model: Any, carrier: QueueCarrier) -> torch.Tensor:
        with generating(model, carrier, PRECISION):
            return written(model)

    models = [make(Cut((0, 3, 5, BLOCKS), number)) for number in range(3)]
    works = [partial(write, model, carrier) for model, carrier in zip(models, queue_carriers(3))]
    expected = written(make(Cut((0, BLOCKS), 0)))
    assert len(set(expected[0, LENGTH:].tolist())) > 1
    assert all(torch.equal(tokens, expected) for tokens in side_by_side(works))
    assert all("forward" not in vars(model) and "generate" not in vars(model) for model in models)
