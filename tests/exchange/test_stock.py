"""What else stock PyTorch does over a group ends as it does over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_members import Members

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def flat(value: Any) -> list[float]:
    return [number for one in value for number in flat(one)] if isinstance(value, (list, tuple)) else [float(value)]


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="torch's PowerSGD hook then waits for a CUDA tensor")


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("unused_parameters", 2),
        ("accumulated", 3),
        ("uneven_inputs", 3),
        ("first_fsdp", 2),
        ("compiled", 2),
        ("senders", 3),
        ("patience", 2),
        pytest.param("hooks", 2, marks=NO_CUDA),
        ("offloaded", 3),
        ("redistributed", 3),
        ("functional", 2),
    ],
)
def test_it_ends_as_over_gloo(members: Members, case: str, world: int) -> None:
    ours = members.run(f"stock_cases:{case}", "muster", world)
    gloos = members.run(f"stock_cases:{case}", "gloo", world)
    for one, other in zip(ours, gloos):
        assert flat(one) == pytest.approx(flat(other), abs=1e-6)
