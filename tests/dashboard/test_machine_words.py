"""What the Machines tab says of who holds the others up."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import started, steps

from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import SERIES_COLUMNS, newest_text
from app.dashboard.tabs.machines import who_is_slow
from app.dashboard.tabs.network import sums
from app.run_view.ribbon import series_of_member
from app.run_view.run_state import reduce_events
from app.shell.text import TableRow, draw, literal
from tests.app.app_events import sync


def test_the_slowest_machine_is_told_with_its_share() -> None:
    """It may do the most samples a second of all, if it has the largest share."""
    share = steps(1, 9, ranks=[0], samples=24, compute=0.75, wait=0.0)
    others = steps(1, 9, ranks=[1, 2], samples=12, compute=0.5, wait=0.25)
    words = who_is_slow(Picture(Path("run"), reduce_events([*started(), *share, *others]))).plain
    assert "holds the others up: its 24 of 48 samples take 750 ms a step, theirs 500 ms" in words


def test_the_share_of_waiting_is_one_figure_on_all_tabs() -> None:
    """Machines that merge every ten steps wait in one of ten, for 2 of its 3 seconds: in a sixth of their time."""
    events = started(2)
    for step in range(1, 41):
        merges = step % 10 == 0
        fields = {"compute": 1.0, "wait": 2.0 * merges, "bytes_sent": 9 * merges}
        events += steps(step, step, ranks=[0, 1], **fields)
        events += [sync(step // 10, member=rank) for rank in (0, 1) if merges]
    picture = Picture(Path("run"), reduce_events(events))
    assert who_is_slow(picture).plain == "no machine holds the others up; 17 % of the time is waiting"
    assert "17 % of the time is waiting" in next(iter(sums(picture))).plain
    assert newest_text(picture, "wait share") == "17 %"
    inner = [point.mean for point in series_of_member(picture.state, 0, "wait share").points()[10:-10]]
    assert inner == pytest.approx([1 / 6] * len(inner))


def test_the_name_of_a_series_is_broken_between_words() -> None:
    row = TableRow("x", (literal("validation perplexity"), literal("257.1")))
    lines = [line.content.plain.split() for line in draw(SERIES_COLUMNS, row, {"name": 20, "value": 5}, 28)]
    assert lines == [["validation", "257.1"], ["perplexity"]]
