from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_folders import BEGAN, live, new_folder, started, steps
from textual.pilot import Pilot

from app.cli.runs.attach import leave, show_run
from app.dashboard.app import DashboardApp
from app.dashboard.reader import RunReader
from app.run_view.last_visit import MARK, SeenMark, Visit, read_mark
from app.run_view.run_state import INTERRUPTED, RunState, apply, at_its_end
from tests.screens.pilot import run, text, until_text
from tests.waiting import until
from training.records.events import ENGINE, Event, MemberEvent, RunEvent, SnapshotEvent, TimingEvent

LEFT = BEGAN + 10
NOW = LEFT + 7 * 3600 + 12 * 60
FIRST = [*started(total=5000), *steps(1, 4, loss=2.31)]
SEEN = len(FIRST)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as there:
        there.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def lost(at: float, member: int = 1, name: str = "air") -> MemberEvent:
    return MemberEvent(member=member, time=at, status="lost", name=name)


def back(at: float, member: int = 1, name: str = "air") -> MemberEvent:
    return MemberEvent(member=member, time=at, status="joined", name=name)


def line(
    tmp_path: Path, later: Iterable[Event], now: float = NOW, ending: str = "", first: Sequence[Event] = FIRST
) -> str:
    """What is said to who left after the first events and comes back."""
    seen(tmp_path, first).leave(LEFT)
    visit, state = Visit(tmp_path), RunState()
    for seq, event in enumerate([*first, *later]):
        visit.note(event.model_copy(update={"seq": seq}), state)
        state = apply(state, event)
    return visit.line(at_its_end(state, ending) if ending else state, now)


def seen(folder: Path, events: Iterable[Event]) -> Visit:
    visit = Visit(folder)
    for seq, event in enumerate(events):
        visit.note(event.model_copy(update={"seq": seq}), RunState())
    return visit


def test_a_night_in_one_line(tmp_path: Path) -> None:
    snapshots = [SnapshotEvent(member=rank, time=BEGAN + 50 * step, step=50 * step, path="x", bytes=1, seconds=0.1)
                 for step in range(1, 5) for rank in (0, 2)]  # fmt: skip
    later = [lost(BEGAN + 60), *snapshots, back(BEGAN + 120), *steps(3000, 3120, loss=1.87)]
    assert line(tmp_path, later) == (
        "Since you left 7 h 12 min ago: step 4 -> 3,120, loss 2.310 -> 1.870, "
        "lost air at 14:14, back at 14:15, 4 snapshots"
    )


def test_nothing_happened(tmp_path: Path) -> None:
    assert line(tmp_path, []) == "Since you left 7 h 12 min ago: nothing, still at step 4"


def test_snapshots_that_are_too_many_to_keep(tmp_path: Path) -> None:
    written = [SnapshotEvent(member=0, time=BEGAN + n, step=n, path="x", bytes=1, seconds=0.1) for n in range(300)]
    assert line(tmp_path, written).endswith("more than 200 snapshots")


def test_who_comes_back_at_once_is_told_nothing(tmp_path: Path) -> None:
    assert not line(tmp_path, steps(5, 9), now=LEFT + 20)


def test_a_clock_that_was_set_back_leaves_out_how_long_ago(tmp_path: Path) -> None:
    assert line(tmp_path, steps(5, 9), now=LEFT - 3600).startswith("Since you left: step 4 -> 9")


def test_a_run_that_ended_meanwhile(tmp_path: Path) -> None:
    assert line(tmp_path, [RunEvent(time=BEGAN + 60, status="completed")]).endswith("ago: completed at 14:14")
    assert line(tmp_path, [*steps(5, 6)], ending=INTERRUPTED).endswith(", interrupted at 14:13")


def test_a_run_that_had_ended_already_is_no_news(tmp_path: Path) -> None:
    ended = [*FIRST, RunEvent(time=BEGAN + 60, status="completed")]
    seen(tmp_path, ended).leave(LEFT)
    visit, state = Visit(tmp_path), RunState()
    for seq, event in enumerate(ended):
        visit.note(event.model_copy(update={"seq": seq}), state)
        state = apply(state, event)
    assert not visit.line(state, NOW)


def test_many_losses_are_counted(tmp_path: Path) -> None:
    later = [event for n in range(5) for event in (lost(BEGAN + 60 + n), back(BEGAN + 60.5 + n))]
    assert line(tmp_path, [*later, lost(BEGAN + 90, 2, "pc")]).endswith(
        "6 times a machine lost (air, pc), pc still away"
    )


def test_many_that_came_back_are_not_lost(tmp_path: Path) -> None:
    first = [*FIRST, *(lost(BEGAN + 5, n, f"pc{n}") for n in range(3, 7))]
    later = [back(BEGAN + 60, n, f"pc{n}") for n in range(3, 7)]
    assert line(tmp_path, later, first=first).endswith("4 times a machine back (pc3, pc4, pc5, pc6)")
    later.append(lost(BEGAN + 70))
    assert line(tmp_path, later, first=first).endswith("1 time a machine lost (air), air still away")


def test_a_stop_and_going_on_lose_no_machine(tmp_path: Path) -> None:
    every = [MemberEvent(member=rank, time=BEGAN + 60, status="left", message="stopped") for rank in range(3)]
    again = [event.model_copy(update={"time": BEGAN + 120}) for event in started(total=5000)]
    later = [*every, RunEvent(time=BEGAN + 61, status="cancelled"), *again, *steps(5, 9, at=BEGAN + 120)]
    assert line(tmp_path, later) == "Since you left 7 h 12 min ago: resumed at 14:15, step 4 -> 9, loss 2.310 -> 1.192"


def test_who_resumes_a_run_in_the_background_knows_how_far_it_was(tmp_path: Path) -> None:
    path = new_folder(tmp_path)
    with live(path, [*FIRST, TimingEvent(time=BEGAN, part=ENGINE, seconds=1.0)]):  # its workers can meet
        leave(path, as_json=False)
    mark = read_mark(path)
    assert mark is not None and mark.seq == SEEN


def test_one_step_is_not_where_the_loss_is(tmp_path: Path) -> None:
    later = [*steps(5, 20, loss=1.0), *steps(21, 21, loss=0.1)]
    assert "loss 2.310 -> 0.9100" in line(tmp_path, later)


def test_of_several_viewers_what_the_last_one_saw_counts(tmp_path: Path) -> None:
    seen(tmp_path, FIRST).leave(LEFT + 5)
    seen(tmp_path, FIRST[:3]).leave(LEFT + 9)
    mark = read_mark(tmp_path)
    assert mark is not None
    assert (mark.seq, mark.at) == (SEEN - 1, LEFT + 5)


@pytest.mark.parametrize("content", [b"", b"{", b'{"seq": "x"}', b'{"seq": 1, "at": -1}', b" " * 9999])
def test_a_mark_that_is_none_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARK).write_bytes(content)
    assert read_mark(tmp_path) is None


def test_a_folder_that_is_gone_gets_no_mark(tmp_path: Path) -> None:
    Visit(tmp_path / "gone").leave(LEFT)
    assert not (tmp_path / "gone").exists()


def left(path: Path) -> None:
    """Let somebody have left a run after its first events, long ago."""
    (path / MARK).write_text(SeenMark(seq=SEEN - 1, at=LEFT).model_dump_json())


def test_the_dashboard_leaves_a_mark_and_tells_who_comes_back(tmp_path: Path) -> None:
    path = new_folder(tmp_path)
    with live(path, FIRST) as run:
        first = RunReader(path)
        first.start()
        until(lambda: first.picture.read)
        first.close()
        mark = read_mark(path)
        left(path)
        for event in steps(5, 9):
            run.append(event)
        again = RunReader(path)
        again.start()
        until(lambda: again.picture.read)
        again.close()
    assert mark is not None and mark.at > LEFT
    assert not first.picture.since
    assert "step 4 -> 9" in again.picture.since


def test_the_news_go_when_the_run_ends(tmp_path: Path) -> None:
    path = new_folder(tmp_path)
    with live(path, FIRST) as run:
        left(path)
        for event in steps(5, 9):
            run.append(event)
        reader = RunReader(path)
        reader.start()
        until(lambda: "step 4 -> 9" in reader.picture.since)
        run.append(RunEvent(time=BEGAN + 60, status="completed"))
        run.finish("completed", {})
    until(lambda: reader.picture.ended is not None)
    reader.close()
    assert reader.picture.since == ""


def test_attach_in_lines_tells_it_too_and_only_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = new_folder(tmp_path)
    with live(path, [*FIRST, *steps(5, 9)]):
        left(path)
    show_run(path, as_json=False, person=lambda as_json: False)
    assert "Since you left" not in capsys.readouterr().err
    show_run(path, as_json=False, person=lambda as_json: True)
    assert "step 4 -> 9" in capsys.readouterr().err
    show_run(path, as_json=False)
    assert "Since you left" not in capsys.readouterr().err


def test_the_line_goes_with_the_first_other_tab(tmp_path: Path) -> None:
    path = new_folder(tmp_path)

    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, "step 4 -> 9")
        await pilot.press("2", "1")
        assert "Since you left" not in text(pilot.app)

    with live(path, [*FIRST, *steps(5, 9)]):
        left(path)
        run(DashboardApp(path), drive, (80, 24))
