"""The loss of many tokens: that of cross entropy, with few of the logits in fp32 at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from training.tasks.text import token_loss as module
from training.tasks.text.token_loss import IGNORED, token_loss

TOKENS, WORDS, SPAN = 24, 50, 4 * 50


@pytest.fixture
def labels() -> torch.Tensor:
    labels = torch.randint(0, WORDS, (TOKENS,), generator=torch.Generator().manual_seed(1))
    labels[::5] = IGNORED
    return labels


@pytest.fixture
def logits(request: pytest.FixtureRequest) -> torch.Tensor:
    values = 8 * torch.randn(TOKENS, WORDS, generator=torch.Generator().manual_seed(2))
    return values.to(request.param).requires_grad_()


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY", 1)
    monkeypatch.setattr(module, "_ROW_ELEMENTS", SPAN)


class Fp32(TorchDispatchMode):
    """Notes the largest tensor of fp32 that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.largest = max(self.largest, made.numel())
        return made


def step(logits: torch.Tensor, labels: torch.Tensor, scale: float = 0.25) -> tuple[torch.Tensor, torch.Tensor]:
    logits.grad = None
    loss = token_loss(logits, labels)
    (scale * loss).backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize(
    ("logits", "precision"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], indirect=["logits"], ids=str
)
def test_loss_and_gradient_are_those_of_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, precision: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradient = step(logits, labels)
    monkeypatch.setattr(module, "_MANY", 10**9)
    plain, plain_gradient = step(logits, labels)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, plain_gradient, rtol=precision, atol=1e-8)
    assert not gradient[labels == IGNORED].any()


@pytest.mark.parametrize("logits", [torch.bfloat16], indirect=True)
def test_only_some_rows_are_in_fp32_at_a_time(
    logits: torch.Tensor, labels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fp32() as mode:
        step(logits, labels)
    assert 0 < mode.largest <= SPAN
    monkeypatch.setattr(module, "_MANY", 10**9)
    with Fp32() as plain:
        step(logits, labels)
    assert plain.largest == logits.numel()


@pytest.mark.parametrize("logits", [torch.float32], indirect=True)
def test_without_a_token_that_counts_there_is_no_loss(logits: torch.Tensor) -> None:
    assert token_loss(logits, torch.full((TOKENS,), IGNORED)).isnan()
    assert nn.functional.cross_entropy(logits, torch.full((TOKENS,), IGNORED)).isnan()
