from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from profiles.errors import BadInput
from tests.layouts.pipeline_runs import (
    PRECISION,
    STEPS,
    agree,
    pipeline_run,
    queue_carriers,
    side_by_side,
    whole_run,
)
from tests.layouts.toy_stages import WIDTH, ToyModel, toy_loss, toy_stages, toy_step, weight_of
from training.hardware.device import Precision
from training.layouts.messages import HEADER_BYTES
from training.layouts.pipeline import Pipeline

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "encoder_blocks", "prepare"),
    [
        (2, 0, _as_it_is),
        (3, 0, _lora),
        (4, 0, _checkpointed),
        (2, 3, _checkpointed),
        (3, 3, _as_it_is),
        (4, 3, _lora),
    ],
)
def test_steps_are_those_of_one_process(stages: int, encoder_blocks: int, prepare: Prepare) -> None:
    """Tied weights, AdamW, clipping, micro-batches whose lengths change."""
    model = ToyModel(encoder_blocks=encoder_blocks)
    prepare(model)
    figures, _ = pipeline_run(toy_stages(model, CUTS[stages]))
    agree(figures, whole_run(model))


@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 1, 4, 6), (0, 2, 3, 5, 6)])
def test_a_frozen_encoder_gets_no_gradient_back(bounds: tuple[int, ...]) -> None:
    model = ToyModel(encoder_blocks=3)
    _frozen_encoder(model)
    figures, carriers = pipeline_run(toy_stages(model, bounds))
    agree(figures, whole_run(model))
    first_gradients = carriers[0].traffic.bytes_received
    stages = len(bounds) - 1
    scalars = 4 + stages + 1  # losses, seconds of the stages, a norm
    assert first_gradients == STEPS * (stages - 1) * scalars * 8  # and no gradient


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"extra": 1}, {"extra": 4}, {"calls": 2}, {"calls": 4}])
def test_neither_the_schedule_nor_calls_change_the_steps(options: dict[str, int]) -> None:
    model = ToyModel()
    figures, _ = pipeline_run(toy_stages(model, CUTS[3]), **options)
    agree(figures, whole_run(model))


@pytest.mark.slow
def test_under_autocast_the_steps_are_those_of_one_stage() -> None:
    precision = Precision(torch.bfloat16, torch.device("cpu"))
    model = ToyModel(encoder_blocks=2)
    whole, _ = pipeline_run(toy_stages(model, (0, 6)), precision=precision)
    agree(pipeline_run(toy_stages(model, CUTS[3]), precision=precision)[0], whole[0])


@pytest.mark.slow
def test_untied_weights_and_a_single_stage() -> None:
    for bounds in ((0, 6), CUTS[3]):
        figures, _ = pipeline_run(toy_stages(model := ToyModel(tied=False), bounds))
        agree(figures, whole_run(model))


def test_holders_of_a_tied_weight_keep_the_same_bits() -> None:
    stages = toy_stages(ToyModel(encoder_blocks=2), (0, 1, 3, 6))
    pipeline_run(stages)
    held = [dict(stage.module.named_parameters())["embedding.weight"] for stage in stages[1:]]
    assert torch.equal(*held)


@pytest.mark.slow
def test_bf16_on_the_wire_is_within_its_rounding_and_half_the_bytes() -> None:
    model = ToyModel(tied=False)
    figures, carriers = pipeline_run(toy_stages(model, (0, 3, 6)), wire=torch.bfloat16)
    exact, exact_carriers = pipeline_run(toy_stages(model, (0, 3, 6)))
    for (loss, norm), (exact_loss, exact_norm) in zip(figures[0], exact[0]):
        assert loss == pytest.approx(exact_loss, abs=3e-3) and norm == pytest.approx(exact_norm, rel=3e-2)
    overhead = STEPS * (4 * HEADER_BYTES + (4 + 2 + 1) * 8)
    assert 2 * (carriers[0].traffic.bytes_sent - overhead) == exact_carriers[0].traffic.bytes_sent - overhead


@pytest.mark.parametrize("encoder_blocks", [0, 2])
def test_a_boundary_carries_the_bytes_of_the_formula(encoder_blocks: int) -> None:
    """``2 b B T D`` a micro-batch, behind an encoder ``2 b B frames D`` more; the middle stage sends both ways."""
    samples, frames, micro_batches = 96, 24 if encoder_blocks else 0, toy_step(0, samples=96)
    stages = toy_stages(ToyModel(encoder_blocks=encoder_blocks, tied=False), (0, 3, 4, 6))
    carriers = queue_carriers(3)
    pipelines = [Pipeline(stage, carrier, PRECISION) for stage, carrier in zip(stages, carriers)]
    weights = [weight_of(batch) for batch in micro_batches]
    side_by_side([partial(p.passes, micro_batches, weights, sum(weights)) for p in pipelines])
    numbers = sum(samples * (batch["words"].shape[1] + frames) * WIDTH for batch in micro_batches)
    assert carriers[1].traffic.bytes_sent == pytest.approx(2 * 4 * numbers, rel=0.02)


def test_an_evaluation_has_the_sums_of_one_process() -> None:
    model = ToyModel(encoder_blocks=2)
    batches = [batch for step in range(5) for batch in toy_step(step)]
    weights = [weight_of(batch) for batch in batches]
    with torch.no_grad():
        losses = [float(toy_loss(model, batch)) for batch in batches]
    expected = sum(loss * weight for loss, weight in zip(losses, weights))
    stages = toy_stages(model, (0, 2, 4, 6))
    pipelines = [Pipeline(stage, carrier, PRECISION) for stage, carrier in zip(stages, queue_carriers(3))]
    sums = side_by_side([partial(p.evaluate, batches, weights) for p in pipelines])
    assert all(s == {"loss_sum": pytest.approx(expected, rel=1e-6), "weight": sum(weights)} for s in sums)
    assert all(parameter.grad is None for stage in stages for parameter in stage.module.parameters())


def test_a_stage_reports_its_times() -> None:
    [stage] = toy_stages(ToyModel(), (0, 6))
    pipeline = Pipeline(stage, queue_carriers(1)[0], PRECISION)
    pipeline.passes(toy_step(0), [1.0] * 4, 4.0)
    assert pipeline.times.micro_batches == 4 and min(pipeline.times.forward, pipeline.times.backward) > 0


def test_fp16_is_refused() -> None:
    [stage], precision = toy_stages(ToyModel(), (0, 6)), Precision(torch.float16, torch.device("cpu"))
    with pytest.raises(BadInput, match="one loss scale for all stages"):
        Pipeline(stage, queue_carriers(1)[0], precision)


def test_a_step_without_micro_batches_leaves_no_gradients() -> None:
    stages = toy_stages(ToyModel(), (0, 2, 6))
    pipelines = [Pipeline(stage, carrier, PRECISION) for stage, carrier in zip(stages, queue_carriers(2))]
    assert side_by_side([partial(p.passes, [], [], 0.0) for p in pipelines]) == [[], []]
    assert side_by_side([p.norm for p in pipelines]) == [0.0, 0.0]
    assert side_by_side([partial(p.evaluate, [], []) for p in pipelines]) == [{"loss_sum": 0.0, "weight": 0.0}] * 2
