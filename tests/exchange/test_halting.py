"""Members whose starter is gone stop after the same step, as far as they can hear of one another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from coordinated_lab import lab

from tests.waiting import until
from training.run.orders import Command, Control

pytestmark = pytest.mark.slow


def last_step(control: Control, step: int) -> int:
    """Train on from a step until this member is to stop; return after which it does."""
    while control.next(step) is None:
        step += 1
    return step


def stop(within: float = 40.0) -> Command:
    return Command(command="stop", reason="nobody is there", within=within)


@pytest.mark.parametrize("told", [[0], [1], [0, 1, 2]])
def test_all_stop_after_the_first_step_that_all_can_reach(tmp_path: Path, told: list[int]) -> None:
    with lab(tmp_path, 3) as running, ThreadPoolExecutor(3) as pool:
        members, controls = running.connect_all(), [Control() for _ in range(3)]
        running.coordinator.group.orphaned = True
        for control, member, done in zip(controls, members, (4, 9, 6)):
            control.serve(member)
            assert control.next(done) is None  # the step after it is under way
        for rank in told:
            controls[rank].post(stop())
        until(lambda: all(control.has_work_by(10) for control in controls))  # they agree, or know the step
        assert list(pool.map(last_step, controls, (5, 10, 7))) == [10, 10, 10]


def test_one_that_alone_is_to_stop_holds_nobody_up_for_long(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        members, controls = running.connect_all(), [Control(), Control()]
        for control, member in zip(controls, members):
            control.serve(member)
            assert control.next(4) is None
        controls[0].post(stop(within=0.4))
        assert last_step(controls[0], 5) == 5
        assert not controls[1].has_work_by(100)
