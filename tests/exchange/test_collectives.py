"""Collectives hold, to the bit, what plain arithmetic in one process says: types, shapes, gaps, uneven parts."""

from __future__ import annotations

import pytest
from group_members import Members

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("reductions", 3),
        ("movements", 2),
        ("movements", 4),
        ("side_by_side", 3),
        ("without_gradients", 2),
        ("with_a_default_device", 2),
    ],
)
def test_they_hold_what_one_process_computes(members: Members, case: str, world: int) -> None:
    assert members.run(f"collective_cases:{case}", "muster", world) == [[]] * world
