"""What the Machines tab says of who holds the others up."""

from __future__ import annotations

from pathlib import Path

from run_folders import started, steps

from app.dashboard.reader import Picture
from app.dashboard.tabs.machines import who_is_slow
from app.run_view.run_state import reduce_events


def test_the_slowest_machine_is_told_with_its_share() -> None:
    """It may do the most samples a second of all, if it has the largest share."""
    share = steps(1, 9, ranks=[0], samples=24, compute=0.75, wait=0.0)
    others = steps(1, 9, ranks=[1, 2], samples=12, compute=0.5, wait=0.25)
    words = who_is_slow(Picture(Path("run"), reduce_events([*started(), *share, *others]))).plain
    assert "holds the others up: its 24 of 48 samples take 750 ms a step, theirs 500 ms" in words
