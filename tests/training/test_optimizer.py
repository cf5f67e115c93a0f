"""AdamW in one pass over the memory, and where it cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from profiles.optimisation import TrainingSettings
from training.optimization.optimizers import FUSED_ON, build_optimizer
from training.snapshots.optimizer_state import load_optimizer, optimizer_tensors


def weights(steps: int, fused: bool, reload_after: int = -1) -> list[torch.Tensor]:
    """Train a ``channels_last`` convolution and a transposed matrix; the gradients lie as a mean over members does."""
    torch.manual_seed(0)
    model = nn.Module()
    model.image = nn.Parameter(torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last))
    model.turned = nn.Parameter(torch.randn(5, 7).t())
    parameters, settings = list(model.parameters()), TrainingSettings(learning_rate=0.01)
    optimizer: torch.optim.Optimizer = build_optimizer(model, settings)
    if not fused:
        groups = [{"params": parameters, "weight_decay": settings.weight_decay}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, settings.adam_beta2), fused=False, foreach=False)
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        if step == reload_after:
            saved = {name: one.contiguous() for name, one in optimizer_tensors(optimizer).items()}
            load_optimizer(optimizer, saved)
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("reload_after", [-1, 1])
def test_weights_that_do_not_lie_row_by_row_are_trained_right(reload_after: int) -> None:
    for found, expected in zip(weights(4, True, reload_after), weights(4, False)):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_usual_weights_take_one_pass() -> None:
    assert build_optimizer(nn.Linear(2, 2), TrainingSettings()).defaults["fused"] is True


def test_one_pass_is_taken_where_torch_has_it() -> None:
    assert FUSED_ON == {"cpu", "cuda", "mps"} <= set(_get_fused_kernels_supported_devices())
    with torch.device("meta"):
        assert build_optimizer(nn.Linear(2, 2), TrainingSettings()).defaults["fused"] is None
