"""A model in stages has the losses and gradients of the whole model, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.layouts.families import FAMILIES, batch, config, loss, plain_model, stages
from training.layouts.stages.probe import forward_in_one_process, gradients_of


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_stages_is_the_whole_model(family: str) -> None:
    settings = config(family)
    samples, model = batch(settings), plain_model(settings)
    expected = loss(model, samples)
    expected.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    for bounds in ((0, 4, 8), (0, 1, 3, 7, 8)):
        parts = stages(settings, *bounds)
        computed, backward = forward_in_one_process(parts, samples)
        backward()
        assert torch.equal(computed, expected)
        in_stages = gradients_of(parts)
        assert gradients.keys() == in_stages.keys()
        assert [name for name in gradients if not torch.equal(gradients[name], in_stages[name])] == []
