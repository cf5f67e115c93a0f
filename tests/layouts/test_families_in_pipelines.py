"""Cut models in a pipeline take the steps of one process: AdamW, clipping, micro-batches whose lengths change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layouts.families import batch, config, loss, plain_model, stages
from tests.layouts.pipeline_runs import agree, pipeline_run, whole_run


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bounds"), [("llama-tied", (0, 3, 6, 8)), ("whisper", (0, 2, 4, 6, 8))])
def test_a_cut_model_in_a_pipeline_takes_the_steps_of_one_process(family: str, bounds: tuple[int, ...]) -> None:
    settings = config(family)

    def make_step(step: int) -> list[Any]:
        return [batch(settings, seed=10 * step + index, length=8 + step) for index in range(4)]

    figures, _ = pipeline_run(stages(settings, *bounds), make_step)
    agree(figures, whole_run(plain_model(settings), loss, make_step))
