"""What is measured of a device, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from training.hardware import device_probe
from training.hardware.device import select_precision
from training.hardware.device_probe import TINY, ProbeSteps, TimedSteps, bf16_gains, copy_speeds, product_speed

CPU, MPS = torch.device("cpu"), torch.device("mps")


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    bf16_gains.cache_clear()
    yield
    bf16_gains.cache_clear()


class Device:
    """Stands for steps on a device: seconds and loss by precision."""

    figures: dict[torch.dtype | None, TimedSteps | Exception]

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self._figures = self.figures[dtype]

    def take(self, count: int) -> TimedSteps:
        if isinstance(self._figures, Exception):
            raise self._figures
        return self._figures


@pytest.mark.parametrize(
    ("half", "found"),
    [
        (TimedSteps(0.5, 1.0), True),
        (TimedSteps(0.99, 1.0), False),
        (TimedSteps(0.5, float("nan")), False),
        (RuntimeError("MPS: BFloat16 is not supported"), False),
        (TypeError("Trying to convert BFloat16 to the MPS backend"), False),
    ],
)
def test_a_mac_computes_in_bf16_where_that_is_faster_and_finite(
    monkeypatch: pytest.MonkeyPatch, half: Any, found: bool
) -> None:
    monkeypatch.setattr(Device, "figures", {None: TimedSteps(1.0, 1.0), torch.bfloat16: half}, raising=False)
    monkeypatch.setattr(device_probe, "ProbeSteps", Device)
    assert select_precision("auto", MPS) is (torch.bfloat16 if found else None)
    assert select_precision("off", MPS) is None


def test_a_processor_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_precision("auto", CPU, gains=lambda kind: pytest.fail("measured")) is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_steps_learn_in_each_precision(dtype: torch.dtype | None) -> None:
    steps = ProbeSteps(CPU, dtype, TINY)
    first, later = steps.take(1), steps.take(20)
    assert first.is_finite and later.loss < first.loss and later.seconds > 0


def test_products_and_copies_have_a_speed() -> None:
    assert product_speed(CPU, torch.float32, TINY, 2) > 0
    assert set(copy_speeds(CPU, TINY)) == {"on the device"}
