"""Machines under a curve, on its axis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import BEGAN, started, steps, view_of

from app.console import short_names
from app.dashboard.braille import Window
from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import ChartData, drawn
from app.dashboard.tabs.overview import loss_chart, progress_line
from app.dashboard.tabs.ribbons import margin, strip_lines, strips
from app.run_view.headline import headline
from app.run_view.ribbon import AwaySpan
from app.run_view.run_state import reduce_events
from tests.app.test_plan_vs_actual import completed, planning, prediction, ran
from training.records.events import Event, MemberEvent, RunEvent, SnapshotEvent

LOST = MemberEvent(member=1, time=BEGAN + 21, status="lost", name="air", message="silent for 5 s")
BACK = MemberEvent(member=1, time=BEGAN + 40, status="joined", name="air", message="at step 40")
SAVED = [SnapshotEvent(member=rank, time=BEGAN + 30, step=30, path="", bytes=1, seconds=1.0) for rank in (0, 2)]


def test_a_machine_s_name_is_whole_beside_the_charts_of_a_narrow_terminal() -> None:
    named = [replace(strip, name="demo-macbook") for strip in strips(whole())]
    assert margin(named, 51, 0) >= len("● demo-macbook")


def picture(*events: Event) -> Picture:
    return Picture(Path("run"), reduce_events(events))


def whole() -> Picture:
    alone = steps(21, 40, ranks=(0, 2), compute=0.1, wait=0.9)
    return picture(*started(), *steps(1, 20), LOST, *alone, *SAVED, BACK, *steps(41, 60))


def lines(data: ChartData, width: int = 80, height: int = 15) -> list[str]:
    found = [line.plain for line in drawn(data, width, height)]
    assert all(len(line) <= width for line in found) and len(found) <= height
    return found


def test_a_ribbon_stands_under_the_steps_of_the_loss() -> None:
    shown = lines(loss_chart(whole()), width=84)
    axis, studio, air, pc, last = shown[-5:]
    assert studio.startswith("● studio│") and air.startswith("● air   │") and pc.startswith("● pc    │")
    assert axis.index("✗") == air.index("✗") and axis.index("+") == air.index("+")
    assert "✗lost: silent for 5 s+" in air
    assert studio[air.index("✗") - 2] == "▅" and studio[air.index("✗") + 4] == "▁"
    assert "◇" in studio and "◇" in pc and "◇" not in air
    assert "8.0/s" in studio and studio.endswith("%") and last.endswith("wait")


@pytest.mark.parametrize(
    ("steps_away", "words"),
    [(21, "✗lost: silent for 5 s+"), (18, "✗lost: silent for…+"), (7, "✗lost··+"), (4, "✗···+"), (1, "✗+")],
)
def test_why_a_machine_was_away_is_told_in_whole_words(steps_away: int, words: str) -> None:
    away = AwaySpan(20.0, 20.0 + steps_away, "lost", "silent for 5 s")
    strip = strips(whole())[1]
    strip = replace(strip, ribbon=replace(strip.ribbon, away=(away,), arrivals=(away.until,)))
    (line,) = strip_lines([strip], Window(0, 60, 0, 1), 8, 60, 1, 0)
    assert words in line.plain


def test_a_legend_takes_the_lines_that_it_needs_and_leaves_the_curve_its_own() -> None:
    data = replace(loss_chart(whole()), title="samples/s", legend=tuple((f"machine-{n}", "") for n in range(9)))
    assert all(any(word in line for line in lines(data, 50, 15)) for word, _ in data.legend)
    assert lines(data, 50, 7)[0].split()[0] == "samples/s" and "more" in lines(data, 50, 7)[0]


def test_a_snapshot_does_not_hide_that_a_machine_was_lost() -> None:
    saved = SnapshotEvent(member=1, time=BEGAN + 20, step=20, path="", bytes=1, seconds=1.0)
    shown = lines(loss_chart(picture(*started(), *steps(1, 20), saved, LOST, *steps(21, 400, ranks=(0, 2)))))
    assert "✗" in next(line for line in shown if "air" in line)


@pytest.mark.parametrize(("height", "machines"), [(15, 3), (10, 3), (9, 1), (8, 1), (7, 0), (4, 0)])
def test_where_there_is_no_room_the_worthiest_stays(height: int, machines: int) -> None:
    shown = lines(loss_chart(whole()), height=height)
    assert sum(line.startswith("● ") for line in shown) == machines
    assert len(shown) == height
    if machines == 1:
        assert any(line.startswith("● air") for line in shown)
    assert any("and 2 more on tab 2" in line for line in shown) == (height == 9)


def test_sixteen_machines_have_their_names_by_both_ends() -> None:
    hello = [MemberEvent(member=n, time=BEGAN, status="joined", name=f"worker-of-the-lab-{n}") for n in range(16)]
    shown = lines(loss_chart(picture(*hello, *steps(1, 9, ranks=range(16)))), 120, 23)
    assert sum(line.startswith("● worker…") for line in shown) == 16
    assert len({line.split("│")[0] for line in shown if line.startswith("● ")}) == 16


def test_before_the_first_step_the_machines_say_what_they_do() -> None:
    shown = lines(loss_chart(picture(*started())))
    assert any(line.startswith("◐ air") and "│cpu" in line and line.endswith("started") for line in shown)
    failed = MemberEvent(member=1, time=BEGAN, status="failed", name="air", message="air: no such folder: model")
    assert any("│no such folder: model" in line for line in lines(loss_chart(picture(*started(), failed))))


def test_the_promise_lies_under_the_loss_and_in_the_bar() -> None:
    state = ran(RunEvent(time=0, status="running", total_steps=40), compute=1.75)
    data = loss_chart(Picture(Path("run"), state, planning=planning()))
    assert len(data.curves) == 2 and data.promised == data.curves[:1]
    assert "┃" in progress_line(state, 20.0, 80, 0.5).plain
    without = Picture(Path("run"), state)
    assert len(loss_chart(without).curves) == 1 and "┃" not in progress_line(state, 20.0, 80).plain


def test_the_verdict_says_when_it_was_promised_and_in_the_end_whether() -> None:
    state, time = ran(), prediction().time
    going = replace(state, total_steps=40)
    assert headline(view_of(going, 15.0, time=time)).details[-2:] == ("promised in 0:05", "pc alone in 0:17")
    ended = completed(state)
    took = "trained 0:20 (0:20 promised; pc alone 0:32)"
    assert headline(view_of(ended, 40.0, time=time)).details == ("step 20/20", took)
    assert headline(view_of(ended, 40.0)).details == ("step 20/20", "trained 0:20")


def test_one_step_fills_its_ribbon() -> None:
    axis, studio = lines(loss_chart(picture(*started(), *steps(1, 1))))[-5:-3]
    assert studio[axis.index("─") :].startswith(20 * "▅")


def test_names_that_end_alike_are_told_apart() -> None:
    long = [f"machine-of-the-laboratory-{n}.some.domain.org" for n in range(12)]
    assert short_names(long, 14)[:2] == ["machin…atory-0", "machin…atory-1"]
    assert short_names(["gpu-rack-seven-left", "gpu-rack-seven-right"], 12) == ["gpu-r…n-left", "gpu-r…-right"]
    assert short_names(["机器" * 5], 6) == ["机器…"]
