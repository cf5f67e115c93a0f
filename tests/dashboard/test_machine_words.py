"""What the Machines tab says of who holds the others up."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import BEGAN, started, steps

from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import SERIES_COLUMNS, newest_text
from app.dashboard.tabs.machines import table_of, who_is_slow
from app.dashboard.tabs.network import sums
from app.run_view.headline import headline
from app.run_view.ribbon import ribbons, series_of_member
from app.run_view.run_state import reduce_events
from app.shell.text import TableRow, draw, literal
from profiles.files.resolve import profile_from_options
from tests.app.app_events import sync
from training.records.events import MemberEvent, ProgressEvent, RequestEvent, WarningEvent
from training.run.local_plan import plan_local_run


def test_the_slowest_machine_is_told_with_its_share() -> None:
    """It may do the most samples a second of all, if it has the largest share."""
    share = steps(1, 9, ranks=[0], samples=24, compute=0.75, wait=0.0)
    others = steps(1, 9, ranks=[1, 2], samples=12, compute=0.5, wait=0.25)
    words = who_is_slow(Picture(Path("run"), reduce_events([*started(), *share, *others]))).plain
    told = "holds the others up: its 24 of 48 samples take 750 ms a step, theirs 500 ms; 22 % of the time is waiting"
    assert told in words


def test_the_share_of_waiting_is_one_figure_on_all_tabs() -> None:
    """Machines that merge every ten steps wait in one of ten, for 2 of its 3 seconds: in a sixth of their time."""
    events = started(2)
    for step in range(1, 41):
        merges = step % 10 == 0
        fields = {"compute": 1.0, "wait": 2.0 * merges, "bytes_sent": 9 * merges}
        events += steps(step, step, ranks=[0, 1], **fields)
        events += [sync(step // 10, member=rank) for rank in (0, 1) if merges]
    picture = Picture(Path("run"), reduce_events(events))
    waiting = "17 % of the time is waiting for exchanges (for the network and for one another)"
    assert who_is_slow(picture).plain == f"no machine holds the others up; {waiting}"
    assert "17 % of the time is waiting" in next(iter(sums(picture))).plain
    assert newest_text(picture, "wait share") == "17 %"
    inner = [point.mean for point in series_of_member(picture.state, 0, "wait share").points()[10:-10]]
    assert inner == pytest.approx([1 / 6] * len(inner))


def test_why_a_lost_machine_has_ended_takes_the_place_of_how_that_was_noticed() -> None:
    killed = "its worker was killed by signal 9: often out of memory, or somebody ended it"
    lost = MemberEvent(member=1, time=BEGAN + 9.5, status="lost", message="its connection broke")
    cause = WarningEvent(
        member=1, time=BEGAN + 9.6, message=f"b does not come back by itself: {killed}", ended_by=killed
    )
    state = reduce_events([*started(2), *steps(1, 9, ranks=[0, 1]), lost, cause, *steps(10, 12, ranks=[0])])
    plan = plan_local_run(profile_from_options("x", {"task": "custom", "model_path": "nowhere:build"}), 2)
    picture = Picture(Path("runs/20260101-000000-abcd-x"), state, plan=plan)
    assert [away.text for away in ribbons(state)[1].away] == [f"lost: {killed}"]
    assert any(killed in detail for detail in headline(picture).details)
    shown = [line.plain for line in table_of(picture)[1][1].detail]
    assert shown[0] == killed and f"runs ask 20260101-000000-abcd --output runs add {picture.name(1)}" in shown[1]


def test_a_lost_machine_was_heard_before_it_was_lost() -> None:
    """What others say of it later is no sign of it."""
    lost = MemberEvent(member=1, time=BEGAN + 9.5, status="lost", message="silent for 5 s")
    state = reduce_events([*started(2), *steps(1, 9, ranks=[0, 1]), lost])
    picture = Picture(Path("run"), state, now=BEGAN + 129.5, live=True, heard={1: 3.0})
    columns, rows = table_of(picture)
    heard = [column.key for column in columns].index("age")
    assert rows[1].cells[heard].plain == "2 min"


def test_a_machine_that_is_added_is_listed_with_its_stage_until_it_has_a_rank() -> None:
    asked = RequestEvent(time=BEGAN + 3, request="1", action="add", machine="mini", outcome="accepted")
    sent = ProgressEvent(time=BEGAN + 5, phase="bytes to mini", done=32_000_000, total=85_000_000)
    begun = [*started(2), *steps(1, 9, ranks=[0, 1]), asked]
    picture = Picture(Path("run"), reduce_events([*begun, sent]), now=BEGAN + 9, live=True)
    row = table_of(picture)[1][2]
    assert [cell.plain for cell in row.cells[:3]] == ["mini", "◐ being added", "6 s"]
    assert [line.plain for line in row.detail] == ["sending to mini 32.0 MB/85.0 MB, 0:04 so far"]
    arrived = MemberEvent(member=2, name="mini", status="started", time=BEGAN + 9)
    assert [row.key for row in table_of(Picture(Path("run"), reduce_events([*begun, arrived])))[1]] == ["0", "1", "2"]


def test_the_name_of_a_series_is_broken_between_words() -> None:
    row = TableRow("x", (literal("validation perplexity"), literal("257.1")))
    lines = [line.content.plain.split() for line in draw(SERIES_COLUMNS, row, {"name": 20, "value": 5}, 28)]
    assert lines == [["validation", "257.1"], ["perplexity"]]
