"""Stages under the conditions of training: several micro-batches under way, dropout, checkpointing, adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import ModelSettings
from speech.whisper.encoder import encode_window
from speech.whisper.model import LORA_TARGETS
from tests.layouts.families import BLOCKS, architecture, batch, config, loss, stages
from training.layouts.stages.cut import CutModel
from training.layouts.stages.pretrained_stage import build_stage, drawing, redraw_adapters
from training.layouts.stages.probe import compare, forward_in_one_process, gradients_of
from training.layouts.stages.stage import Cut
from training.tasks.pretrained import add_lora, recompute_activations

Prepare = Callable[[nn.Module], nn.Module]


def prepared(settings: Any, bounds: tuple[int, ...], prepare: Prepare) -> list[CutModel]:
    """Return stages of which each was prepared as the whole model would be."""
    models = (build_stage(architecture(settings), settings, Cut(bounds, k)) for k in range(len(bounds) - 1))
    return [CutModel(prepare(model).train(), loss) for model in models]


def checkpointed(model: nn.Module) -> nn.Module:
    recompute_activations(model)
    return model


def adapted(model: nn.Module, targets: str = "q_proj, v_proj") -> nn.Module:
    settings = ModelSettings(model_path="base", lora_rank=4, lora_dropout=0.2, lora_target_modules=targets)
    model.name_or_path = settings.model_path
    model = add_lora(model, settings, ())
    redraw_adapters(model, seed=3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at the begin, and then no gradient reaches A
            with drawing(4, name), torch.no_grad():
                weight.normal_()
    return model


def with_frozen_encoder(model: nn.Module) -> nn.Module:
    for name, weight in model.named_parameters():
        if ".encoder." in name:
            weight.requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "whisper"])
def test_each_stage_drops_what_one_process_would(family: str) -> None:
    settings = config(family, dropout=0.3)
    [whole] = stages(settings, 0, BLOCKS)
    compare(whole, stages(settings, 0, 1, 3, 7, 8), batch(settings), seed=5)


def test_micro_batches_drop_differently_and_leave_the_generators_alone() -> None:
    settings = config("gpt2", dropout=0.3)
    [whole] = stages(settings, 0, BLOCKS)
    state = torch.get_rng_state()
    losses = [forward_in_one_process([whole], batch(settings), seed)[0] for seed in (5, 6, 5)]
    assert losses[0] == losses[2] != losses[1]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "bounds"), [("llama", (0, 3, 6, 8)), ("gpt2", (0, 3, 8)), ("whisper", (0, 3, 6, 8))]
)
def test_blocks_are_recomputed_while_other_micro_batches_are_under_way(family: str, bounds: tuple[int, ...]) -> None:
    settings = config(family, dropout=0.3)
    gradients = []
    for parts in (stages(settings, 0, BLOCKS), prepared(settings, bounds, checkpointed)):
        passes = [forward_in_one_process(parts, batch(settings, seed), seed) for seed in range(4)]
        for _, backward in passes:
            backward()
        gradients.append(gradients_of(parts))
    expected, computed = gradients
    assert expected.keys() == computed.keys()
    for name, gradient in expected.items():  # a tied weight's is summed in another order
        torch.testing.assert_close(computed[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied", "whisper"])
def test_adapters_are_drawn_and_trained_as_in_the_whole_model(family: str) -> None:
    settings = config(family)
    [whole] = prepared(settings, (0, BLOCKS), adapted)
    parts = prepared(settings, (0, 3, 6, 8), lambda model: checkpointed(adapted(model)))
    weights = dict(whole.module.named_parameters())
    for part in parts:
        assert all(torch.equal(weight, weights[name]) for name, weight in part.module.named_parameters())
    compare(whole, parts, batch(settings), seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["q_proj, lm_head", "lm_head"])
def test_the_adapters_of_a_head_are_on_its_stage_alone(targets: str) -> None:
    settings = config("llama")
    whole, *parts = (
        part
        for cut in ((0, BLOCKS), (0, 3, 6, 8))
        for part in prepared(settings, cut, partial(adapted, targets=targets))
    )
    compare(whole, parts, batch(settings), seed=5)
    names = [{name for name, p in part.module.named_parameters() if p.requires_grad} for part in (whole, *parts)]
    assert names[0] == set().union(*names[1:])
    assert sum(any("lm_head" in name for name in part) for part in names[1:]) == 1


@pytest.mark.parametrize("cut", [(0, BLOCKS), (0, 3, 8)])
def test_adapters_that_cannot_be_merged_are_refused(cut: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="lm_head has the weight of the embedding, so its adapters cannot be merged"):
        prepared(config("llama-tied"), cut, partial(adapted, targets="lm_head"))


def test_a_target_that_no_stage_has_is_refused_with_the_layers_of_all() -> None:
    with pytest.raises(BadInput, match="no layer 'heads' in the model; it has: .*lm_head"):
        prepared(config("llama"), (0, 3, 8), partial(adapted, targets="heads"))


@pytest.mark.slow
def test_a_stage_without_adapters_is_frozen() -> None:
    def adapted_decoder(model: nn.Module) -> nn.Module:
        model.name_or_path = "base"
        settings = ModelSettings(model_path="base", lora_rank=4, lora_target_modules="all-linear")
        model = add_lora(checkpointed(model), settings, LORA_TARGETS, r"model\.encoder\..*")
        redraw_adapters(model, seed=3)
        return model

    settings = config("whisper")
    [whole] = prepared(settings, (0, BLOCKS), adapted_decoder)
    parts = prepared(settings, (0, 2, 4, 8), adapted_decoder)
    trained = [{name for name, weight in part.module.named_parameters() if weight.requires_grad} for part in parts]
    assert trained[:2] == [set(), set()]
    assert all(name.startswith("base_model.model.model.encoder.") for name, _ in parts[0].module.named_parameters())
    compare(whole, parts, batch(settings), seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [(0, 4, 8), (0, 2, 6, 8)])
def test_no_gradient_returns_to_a_frozen_encoder(bounds: tuple[int, ...]) -> None:
    settings = config("whisper")
    [whole] = prepared(settings, (0, BLOCKS), with_frozen_encoder)
    parts = prepared(settings, bounds, with_frozen_encoder)
    assert parts[0].departing_require_grad(()) == (False,)
    if len(parts) == 3:
        assert parts[1].departing_require_grad((False,)) == (True, False)
    compare(whole, parts, batch(settings))


def test_a_task_that_runs_the_encoder_by_itself_needs_no_change() -> None:
    def windowed_loss(model: Any, samples: Any) -> torch.Tensor:
        encoded = encode_window(model, samples["input_features"])
        text = {name: samples[name] for name in ("decoder_input_ids", "labels")}
        output: torch.Tensor = model(encoder_outputs=encoded, **text, use_cache=False).loss
        return output

    settings = config("whisper", dropout=0.3)
    whole, *parts = (
        CutModel(part.module, windowed_loss) for part in stages(settings, 0, BLOCKS) + stages(settings, 0, 3, 6, 8)
    )
    compare(whole, parts, batch(settings), seed=5)
    assert [len(part.arriving(batch(settings))) for part in parts] == [0, 1, 2]


@pytest.mark.slow
def test_mixed_precision_rounds_where_the_whole_model_does() -> None:
    settings = config("whisper")
    with torch.autocast("cpu", torch.bfloat16):
        compare(*stages(settings, 0, BLOCKS), stages(settings, 0, 3, 6, 8), batch(settings))


@pytest.mark.slow
def test_a_stage_knows_the_shapes_that_arrive() -> None:
    settings = config("whisper")
    parts = stages(settings, 0, 2, 4, 6, 8)
    samples = batch(settings, length=7)
    shapes = [[tuple(spec.shape) for spec in part.arriving(samples)] for part in parts]
    assert shapes == [[], [(3, 10, 32)], [(3, 10, 32)], [(3, 7, 32), (3, 10, 32)]]
    assert {spec.dtype for part in parts for spec in part.arriving(samples)} == {torch.float32}


@pytest.mark.slow
def test_stages_name_the_weights_that_several_hold() -> None:
    parts = stages(config("llama-tied"), 0, 3, 6, 8)
    holders = {"model.embed_tokens.weight": (0, 2)}
    assert [part.shared for part in parts] == [holders, {}, holders]
    decoder = {"model.decoder.embed_tokens.weight": (1, 2)}
    assert [part.shared for part in stages(config("whisper"), 0, 3, 6, 8)] == [{}, decoder, decoder]
    assert [part.shared for part in stages(config("llama"), 0, 4, 8)] == [{}, {}]
