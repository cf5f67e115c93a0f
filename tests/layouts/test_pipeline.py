from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from profiles.errors import BadInput
from tests.layouts.pipeline_runs import (
    PRECISION,
    STEPS,
    pipeline_run,
    queue_carriers,
    side_by_side,
    whole_run,
)
from tests.layouts.toy_stages import WIDTH, ToyModel, ToyStage, toy_step, toy_weight
from training.hardware.device import Precision
from training.layouts.messages import HEADER_BYTES
from training.layouts.pipeline import Pipeline
from training.layouts.stage import Cut

CUTS = {2: (0, 2, 6), 3: (0, 2, 5, 6), 4: (0, 1, 3, 4, 6)}
Prepare = Callable[[ToyModel], None]


def _lora(model: ToyModel) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _frozen_encoder(model: ToyModel) -> None:
    model.blocks[: model.encoder_blocks].requires_grad_(False)


def _checkpointed(model: ToyModel) -> None:
    model.checkpointed = True


def _as_it_is(model: ToyModel) -> None:
    pass


def _agree(figures: list[list[tuple[float, float]]], expected: list[tuple[float, float]]) -> None:
    for stage_figures in figures:
        for (loss, norm), (whole_loss, whole_norm) in zip(stage_figures, expected):
            assert loss == pytest.approx(whole_loss, abs=1e-6)
            assert norm == pytest.approx(whole_norm, rel=1e-6)


@pytest.mark.parametrize("stages", CUTS)
@pytest.mark.parametrize("encoder_blocks", [0, 3], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("prepare", [_as_it_is, _lora, _checkpointed])
def test_steps_are_those_of_one_process(stages: int, encoder_blocks: int, prepare: Prepare) -> None:
    """Tied weights, AdamW, clipping, micro-batches whose lengths change."""
    model = ToyModel(encoder_blocks=encoder_blocks)
    prepare(model)
    figures, _, _ = pipeline_run(model, CUTS[stages])
    _agree(figures, whole_run(model))


@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 1, 4, 6), (0, 2, 3, 5, 6)])
def test_a_frozen_encoder_gets_no_gradient_back(bounds: tuple[int, ...]) -> None:
    model = ToyModel(encoder_blocks=3)
    _frozen_encoder(model)
    figures, carriers, _ = pipeline_run(model, bounds)
    _agree(figures, whole_run(model))
    first_gradients = carriers[0].traffic.bytes_received
    assert first_gradients == STEPS * (len(bounds) - 2) * (4 + 1) * 8  # the other stages' losses and norms alone


@pytest.mark.parametrize("options", [{"extra": 1}, {"extra": 4}, {"calls": 2}, {"calls": 4}])
def test_neither_the_schedule_nor_calls_change_the_steps(options: dict[str, int]) -> None:
    model = ToyModel()
    figures, _, _ = pipeline_run(model, CUTS[3], **options)
    _agree(figures, whole_run(model))


def test_untied_weights_and_a_single_stage() -> None:
    for bounds in ((0, 6), CUTS[3]):
        figures, _, _ = pipeline_run(model := ToyModel(tied=False), bounds)
        _agree(figures, whole_run(model))


def test_holders_of_a_tied_weight_keep_the_same_bits() -> None:
    _, _, stages = pipeline_run(ToyModel(encoder_blocks=2), (0, 1, 3, 6))
    held = [dict(stage.module.named_parameters())["embedding.weight"] for stage in stages[1:]]
    assert torch.equal(*held)


def test_bf16_on_the_wire_is_within_its_rounding_and_half_the_bytes() -> None:
    model = ToyModel(tied=False)
    figures, carriers, _ = pipeline_run(model, (0, 3, 6), wire=torch.bfloat16)
    exact, exact_carriers, _ = pipeline_run(model, (0, 3, 6))
    for (loss, norm), (exact_loss, exact_norm) in zip(figures[0], exact[0]):
        assert loss == pytest.approx(exact_loss, abs=3e-3) and norm == pytest.approx(exact_norm, rel=3e-2)
    overhead = STEPS * (4 * HEADER_BYTES + (4 + 1) * 8)
    assert 2 * (carriers[0].traffic.bytes_sent - overhead) == exact_carriers[0].traffic.bytes_sent - overhead


@pytest.mark.parametrize("encoder_blocks", [0, 2])
def test_a_boundary_carries_the_bytes_of_the_formula(encoder_blocks: int) -> None:
    """``2 b B T D`` a micro-batch, behind an encoder ``2 b B frames D`` more; the middle stage sends both ways."""
    samples, frames, micro_batches = 96, 24 if encoder_blocks else 0, toy_step(0, samples=96)
    stages = [ToyStage(ToyModel(encoder_blocks=encoder_blocks, tied=False), Cut((0, 3, 4, 6), k)) for k in range(3)]
    carriers = queue_carriers(3)
    pipelines = [Pipeline(stage, carrier, PRECISION) for stage, carrier in zip(stages, carriers)]
    weights = [toy_weight(batch) for batch in micro_batches]
    side_by_side([lambda p=p: p.passes(micro_batches, weights, sum(weights)) for p in pipelines])  # type: ignore[misc]
    numbers = sum(samples * (batch["words"].shape[1] + frames) * WIDTH for batch in micro_batches)
    assert carriers[1].traffic.bytes_sent == pytest.approx(2 * 4 * numbers, rel=0.02)


def test_an_evaluation_has_the_sums_of_one_process() -> None:
    model = ToyModel(encoder_blocks=2)
    batches = [batch for step in range(5) for batch in toy_step(step)]
    weights = [toy_weight(batch) for batch in batches]
    with torch.no_grad():
        losses = [float(model.run(range(6), batch, ())[0]) for batch in batches]
    expected = sum(loss * weight for loss, weight in zip(losses, weights))
    stages = [ToyStage(model, Cut((0, 2, 4, 6), stage)) for stage in range(3)]
    pipelines = [Pipeline(stage, carrier, PRECISION) for stage, carrier in zip(stages, queue_carriers(3))]
    sums = side_by_side([lambda p=p: p.evaluate(batches, weights) for p in pipelines])  # type: ignore[misc]
    assert all(s == {"loss_sum": pytest.approx(expected, rel=1e-6), "weight": sum(weights)} for s in sums)
    assert all(parameter.grad is None for stage in stages for parameter in stage.module.parameters())


def test_a_stage_reports_its_times() -> None:
    stage = ToyStage(ToyModel(), Cut((0, 6), 0))
    pipeline = Pipeline(stage, queue_carriers(1)[0], PRECISION)
    pipeline.passes(toy_step(0), [1.0] * 4, 4.0)
    assert pipeline.times.micro_batches == 4 and min(pipeline.times.forward, pipeline.times.backward) > 0


def test_fp16_is_refused() -> None:
    stage, precision = ToyStage(ToyModel(), Cut((0, 6), 0)), copy.copy(Precision(torch.float16, torch.device("cpu")))
    with pytest.raises(BadInput, match="one loss scale for all stages"):
        Pipeline(stage, queue_carriers(1)[0], precision)
