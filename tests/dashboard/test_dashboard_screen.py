from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from run_folders import BEGAN, live, new_folder, started, steps
from textual.events import Key
from textual.pilot import Pilot

from app.dashboard.app import DashboardApp
from app.dashboard.dialogs.commands import Commands
from app.dashboard.tabs.charts import Chart
from app.dashboard.tabs.machines import MachinesPane
from app.dashboard.tabs.one_machine import OneMachine
from distributed.hosts.schema import requested_machine
from tests.screens.pilot import SIZES, lines, resize, run, text, until, until_text
from tests.waiting import PATIENCE
from training.records.events import EvaluationEvent, MemberEvent, RequestEvent, RunEvent, SnapshotEvent
from training.records.run_folder import RunFolder
from training.run.requests.request_book import take_requests
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, Sample, Showcase

pytestmark = pytest.mark.slow

Drive = Callable[[Pilot[Any], DashboardApp], Awaitable[None]]
TABS = "123456"
LOST = MemberEvent(member=1, time=BEGAN + 31, status="lost", name="air", message="silent for 5 s")
BACK = MemberEvent(member=1, time=BEGAN + 40, status="joined", name="air", message="joins a running group")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with live(new_folder(tmp_path), [*started(), *steps(1, 30)]) as run_folder:
        yield run_folder


def show(path: Path, drive: Drive, size: tuple[int, int] = (80, 24), **more: Any) -> None:
    """Show a run until ``drive`` is done; it begins when everything was read."""
    app = DashboardApp(path, **more)

    async def whole(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.dashboard.picture.read)
        await drive(pilot, app)

    run(app, whole, size)


@pytest.mark.parametrize("size", [*SIZES, (72, 20)])
def test_every_tab_is_whole_at_every_size(folder: RunFolder, size: tuple[int, int]) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        for key in TABS:
            await pilot.press(key)
            shown = lines(app)
            assert len(shown) == size[1]
            assert all(word in shown[-1] for word in ("d Detach", "esc Back", "? Help", "^p Palette")), shown[-1]
            assert all(f"{place} " in shown[1] for place in TABS)
            if key in "2":
                assert all(any(name in line for line in shown) for name in ("studio", "air", "pc"))

    show(folder.path, drive, size)


def test_the_headline_of_an_interrupted_run_is_whole_at_80_columns(tmp_path: Path) -> None:
    path = new_folder(tmp_path)
    saved = SnapshotEvent(time=BEGAN + 30, member=0, step=30, path="snapshots/30", bytes=1, seconds=0.1)
    with live(path, [*started(), *steps(1, 32), saved]):
        pass

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await until_text(pilot, "Interrupted")
        assert app.dashboard.picture.state.saved_progress in " ".join(text(app).split())

    show(path, drive)


def test_machines_whose_names_begin_alike_are_told_apart_in_the_logs(folder: RunFolder) -> None:
    names = ("whisper-trainer-attic1", "whisper-trainer-cellar")
    for name in names:
        (folder.path / "logs" / f"{name}.log").write_text(f"a line of {name}\n")

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("5")
        await until_text(pilot, "a line of")
        said = [line.split(" a line of ") for line in lines(app) if " a line of " in line]
        assert len({name.strip() for name, _ in said}) == 2
        await resize(pilot, 120, 32)
        assert all(f"{name} a line of {name}" in text(app) for name in names)

    show(folder.path, drive)


def test_resizes_keep_tab_and_selection(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("2", "down", "down")
        focused = app.focused
        assert app.dashboard.query_one(MachinesPane).selected == 2
        for size in ((160, 45), (80, 24), (60, 16), (160, 45)) * 2:
            await resize(pilot, *size)
            if size == (60, 16):
                assert "needs 72x20" in text(app)
                assert any(
                    line.rstrip().endswith(f"runs attach --plain {folder.metadata.run_id[-4:]}") for line in lines(app)
                )  # whole
        assert app.dashboard.query_one(MachinesPane).selected == 2
        assert app.focused is focused

    show(folder.path, drive)


@pytest.mark.parametrize(("width", "beside"), [(120, True), (118, False)])
def test_beside_the_table_stand_figures_course_and_log_of_the_selected_machine(
    folder: RunFolder, width: int, beside: bool
) -> None:
    (folder.path / "logs" / "air.log").write_text("first\nlast of air\n")

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("2", "down")
        shown = app.dashboard.query_one(OneMachine)
        assert shown.display is beside
        if beside:
            await until_text(pilot, "last of air")
            assert "│  air  ● training  cpu" in text(app)
            assert "wait share" in text(app)

    show(folder.path, drive, (width, 32))


def test_a_lost_machine_and_its_return(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        for event in (LOST, *steps(32, 35, ranks=(0, 2))):
            folder.append(event)
        await until_text(pilot, "Degraded · 2/3 machines · air lost ")
        assert " ago" in lines(app)[2]  # it was lost long before now
        await pilot.press("2")
        await until_text(pilot, "✗ lost")
        assert sum("silent for 5 s" in line for line in lines(app)) == 1  # the row says why
        await pilot.press("5")
        await until_text(pilot, "root cause")
        await until_text(pilot, "all machines, all levels: 1 line")  # it logged nothing itself
        for event in (BACK, *steps(36, 45)):
            folder.append(event)
        await until(pilot, lambda: "2/3" not in lines(app)[2] and "root cause" not in text(app))
        await until_text(pilot, "all machines, all levels: 2 lines")
        assert "air WARNING lost: silent for 5 s" in text(app)
        await pilot.press("6")
        await until_text(pilot, "air is back")

    show(folder.path, drive)


def test_the_cause_that_a_machine_logged_stands_above_what_followed(folder: RunFolder) -> None:
    before, after = (datetime.fromtimestamp(BEGAN + at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ") for at in (24, 32))
    (folder.path / "logs" / "air.log").write_text(f"{before} ERROR network: en0: link is down\n")
    (folder.path / "logs" / "pc.log").write_text(f"{after} ERROR nothing came from air\n" * 900)
    folder.append(LOST)

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("5")
        await until_text(pilot, "root cause")
        await until(pilot, lambda: "link is down" in lines(app)[4])
        assert "then" in lines(app)[5] and "air lost: silent for 5 s" in lines(app)[5]

    show(folder.path, drive)


def test_an_independent_loss_is_another_cause(folder: RunFolder) -> None:
    folder.append(LOST)
    folder.append(MemberEvent(member=2, time=LOST.time + 25, status="lost", name="pc", message="its agent is gone"))

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("5")
        await until_text(pilot, "another cause")
        assert "pc lost: its agent is gone" in next(line for line in lines(app) if "another cause" in line)
        assert not any("then" in line for line in lines(app)[3:7])

    show(folder.path, drive)


def test_of_a_flood_the_screen_says_which_lines_it_holds_and_what_shows_all(folder: RunFolder) -> None:
    for name in ("air", "pc"):
        (folder.path / "logs" / f"{name}.log").write_text("".join(f"line {n}\n" for n in range(30_000)) + "ERROR x\n")

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("5")
        await until_text(pilot, "all levels: 2000 lines, of the newest 2000 lines")
        await until_text(pilot, "in all 60002 lines: 2 errors, 0 warnings; to read them: ")
        assert f"runs logs {folder.path.name[:20]}" in text(app)
        await pilot.press("l", "l")
        await until_text(pilot, "errors: 2 lines, of the newest 2000 lines")
        await pilot.press("m")
        await until_text(pilot, "in all 30001 lines: 1 error, 0 warnings")

    show(folder.path, drive)


def test_logs_are_sieved_by_machine_level_and_words(folder: RunFolder) -> None:
    (folder.path / "logs" / "air.log").write_text("fine\nWARNING warm\nERROR hot\n")
    long = " ".join(f"word{number}" for number in range(30))
    (folder.path / "logs" / "pc.log").write_text(f"also fine {long}\n")

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("5")
        await until_text(pilot, "all machines, all levels: 4 lines")
        assert long.replace(" ", "") in "".join(text(app).split())  # over several rows
        await pilot.press("l", "l")
        await until_text(pilot, "errors: 1 line")
        await pilot.press("l", "m")
        await until_text(pilot, "air, all levels: 3 lines")
        await pilot.press("m", "m", "slash", *"FINE")
        await until_text(pilot, "with 'FINE': 2 lines")
        await pilot.press("escape")
        await until_text(pilot, "all machines, all levels: 4 lines")

    show(folder.path, drive)


def test_a_frozen_picture_stands_still_and_goes_on(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("space")
        await until_text(pilot, "frozen")
        for event in steps(31, 60):
            folder.append(event)
        await pilot.pause(0.7)
        assert "step 30/100" in text(app)
        await pilot.press("space")
        await until_text(pilot, "step 60/100")

    show(folder.path, drive)


def test_requests_are_left_and_their_outcome_is_shown(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("s")
        (asked,) = take_requests(folder.path)
        assert asked.action == "snapshot"
        folder.append(RequestEvent(request=asked.id, action="snapshot", outcome="refused", message="too early"))
        await until_text(pilot, "snapshot refused: too early")
        folder.append(RunEvent(status="paused"))
        await until_text(pilot, "Paused")
        await pilot.press("p")
        assert [one.action for one in take_requests(folder.path)] == ["resume"]
        folder.append(RequestEvent(time=BEGAN + 32, request="stop", action="stop", outcome="accepted"))
        await until_text(pilot, "Stopping · ")
        await pilot.press("p")
        assert take_requests(folder.path) == [] and "x Stop" in text(app) and "p Resume" not in text(app)

    show(folder.path, drive)


def test_a_machine_is_let_go_after_a_question(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("minus", "down", "minus")
        await until_text(pilot, "Drop air?")
        await pilot.press("escape")
        assert take_requests(folder.path) == []
        await pilot.press("minus", "enter")
        assert [(one.action, one.machine) for one in take_requests(folder.path)] == [("drop", "air")]

    show(folder.path, drive)


def test_a_machine_is_added_by_its_address(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("plus", *"me@mini.local", "enter")
        (asked,) = take_requests(folder.path)
        assert asked.action == "add" and asked.entry is not None
        assert (asked.entry["user"], asked.entry["address"]) == ("me", "mini.local")

    show(folder.path, drive)


def test_this_computer_is_added_without_an_ssh_server(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("plus")
        await until_text(pilot, "or localhost for this computer")
        await pilot.press(*socket.gethostname(), "enter")
        (asked,) = take_requests(folder.path)
        assert asked.entry is not None and requested_machine(asked.entry).is_local

    show(folder.path, drive)


def test_enter_without_a_text_adds_the_machine_that_is_away(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("plus", "enter")
        await until_text(pilot, "Type it as after ssh")
        await pilot.press("escape")
        folder.append(LOST)
        await until_text(pilot, "air lost")
        await pilot.press("plus", "enter")
        assert [(one.action, one.machine) for one in take_requests(folder.path)] == [("add", "air")]

    show(folder.path, drive)


def test_leaving_asks_while_the_run_lives_and_detach_does_not(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("q")
        await until_text(pilot, "The run goes on without this screen")
        await pilot.press("escape", "d")
        assert app.return_code is not None

    show(folder.path, drive)
    assert take_requests(folder.path) == []


def test_leaving_does_not_wait_for_a_report(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, left, written = Event(), Event(), Event()

    def slow(run_dir: Path) -> Path:
        begun.set()
        left.wait(PATIENCE)
        written.set()
        return run_dir

    monkeypatch.setattr("app.html_report.page.write_report", slow)

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("o")
        await until(pilot, begun.is_set)
        await until(pilot, lambda: any("writing the report" in one.message for one in app._notifications))
        await pilot.press("d")

    show(folder.path, drive)
    assert not written.is_set()
    left.set()
    assert written.wait(PATIENCE)


def test_where_a_report_is_stands_unbroken_in_a_box_of_its_own(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "output/20261130-080334-c546-demo-3-machines/report.html"
    monkeypatch.setattr("app.html_report.page.write_report", lambda run_dir: Path(path))
    monkeypatch.setattr("app.html_report.page.shown_path", str)
    monkeypatch.setattr("app.html_report.page.has_browser", lambda: False)

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("o")
        await until_text(pilot, path)
        assert "y Copy" in text(app)
        await until(pilot, lambda: not app._notifications)
        copied: list[str] = []
        monkeypatch.setattr(app, "copy", copied.append)
        await pilot.press("y")
        assert copied == [path] and app.screen is app.dashboard

    show(folder.path, drive)


@pytest.mark.parametrize("saved", [True, False])
def test_stop_asks_and_shows_that_nothing_is_left(folder: RunFolder, saved: bool) -> None:
    for rank in range(3 * saved):
        folder.append(SnapshotEvent(member=rank, step=30, path="", bytes=1, seconds=1.0, live=(0, 1, 2)))

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("x", "enter")
        await until_text(pilot, "the run was asked to stop")
        assert [one.action for one in take_requests(folder.path)] == ["stop"]
        folder.append(RunEvent(status="cancelled", message="stopped by the user"))
        folder.finish("cancelled", {}, "stopped by the user")
        folder.close()
        await until_text(pilot, "the run has ended (stopped)")
        assert ("--resume" in text(app)) is saved  # there is nothing to resume without a snapshot
        await pilot.press("escape", "2")
        assert sum("stopped" in line for line in lines(app)[4:]) == 3 and "training" not in text(app)

    show(folder.path, drive)


def test_a_finished_run_opens_in_the_same_screens(folder: RunFolder) -> None:
    folder.append(RunEvent(status="completed"))
    folder.finish("completed", {"seconds": 3.0})
    folder.close()

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await until_text(pilot, "Completed · step 30/100")
        for key in TABS:
            await pilot.press(key)
            assert "holds the others up" not in text(app) and "is waiting" not in text(app)
        assert "o Report" in lines(app)[-1] and "Pause" not in lines(app)[-1]
        await pilot.press("s")
        await until(pilot, lambda: any("no process is working" in one.message for one in app._notifications))

    show(folder.path, drive)


@pytest.mark.parametrize("kept", [True, False])
def test_a_completed_run_shows_what_it_reached_and_lists_what_to_type(folder: RunFolder, kept: bool) -> None:
    for step, wer in ((0, 0.9), (30, 0.125)):
        folder.append(
            EvaluationEvent(
                step=step, split="validation", metrics={"wer": wer}, samples=8, seconds=1.0, time=BEGAN + 31
            )
        )
    if kept:
        (folder.path / "model").mkdir(exist_ok=True)
        (folder.path / "model" / "model.safetensors").touch()
    folder.append(RunEvent(status="completed"))
    folder.finish("completed", {"seconds": 3.0})
    folder.close()

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await until_text(pilot, "WER     validation  90.0 % -> 12.5 %")
        assert ("model   " in text(app)) == kept and "n Next" in lines(app)[-1]
        await pilot.press("n")
        await until_text(pilot, "What next?")
        assert (f"cli_typer.py model transcribe {folder.path.name[:20]}" in text(app)) == kept

    show(folder.path, drive)


def test_a_failed_run_says_why_and_what_to_do_and_offers_no_snapshot_that_is_not_there(folder: RunFolder) -> None:
    why = "air: out of memory: the batch of 8 does not fit into 2.0 GB; set batch_size to 4 or less, or drop air"
    folder.append(RunEvent(status="failed", message=why))
    folder.finish("failed", {}, why)
    folder.close()

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await until_text(pilot, "Failed · air: out of memory")
        await until_text(pilot, "hint: ")
        assert "or drop air" in text(app)
        await pilot.press("n")
        assert "--resume" not in text(app)

    show(folder.path, drive)


def test_a_terminal_of_another_encoding_gets_ascii(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stderr__", TextIOWrapper(BytesIO(), encoding="iso8859-1"))
    assert DashboardApp(folder.path).ascii_only


def clip(name: str, why: str, after: str) -> Sample:
    texts = {"reference": "open the red door", "before": "over a", "after": after}
    return Sample.model_validate({"id": name, "why": why, **texts, "first": 1.0, "last": 0.25, "sound": "QUJD"})


def test_a_completed_run_shows_what_its_model_made_of_clips_before_and_after(folder: RunFolder) -> None:
    samples = (
        clip("c1", "improved most", "open the door"),
        clip("c2", "most errors after training", "\x1b[31mopen[/]"),
    )
    Showcase(kind="speech", split="test", step=30, of=9, samples=samples).write(folder.path / FOLDER / NAME)
    (folder.path / "model").mkdir(exist_ok=True)
    (folder.path / "model" / "model.safetensors").touch()
    folder.append(RunEvent(status="completed"))
    folder.finish("completed", {"seconds": 3.0})
    folder.close()

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await until_text(pilot, "after   open the (red) door")
        assert "before  " in text(app) and "over" in text(app) and "b Samples" in lines(app)[-1]
        await pilot.press("b")
        await until_text(pilot, "improved most, c1, WER 100.0 % -> 25.0 %")
        assert "Of 9 held-out clips" in text(app) and "\x1b" not in text(app) and "esc Close" in text(app)

    show(folder.path, drive)


def test_enter_right_after_n_does_what_the_first_row_says(folder: RunFolder) -> None:
    samples = (clip("c1", "improved most", "open the red door"),)
    Showcase(kind="speech", split="test", step=30, of=1, samples=samples).write(folder.path / FOLDER / NAME)
    folder.append(RunEvent(status="completed"))
    folder.finish("completed", {"seconds": 3.0})
    folder.close()

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await until_text(pilot, "n Next")
        app.opening_pause = 0.5
        for key, character in (("n", "n"), ("enter", "\r")):  # as a terminal sends what is typed at once
            app.post_message(Key(key, character))
        await until_text(pilot, "A held-out clip")

    show(folder.path, drive)


@pytest.mark.parametrize(("tab", "low", "high"), [("1", 2, 3), ("2", 1, 2)])
def test_a_chart_has_four_rows_at_least_or_there_is_one_instead_of_two(
    folder: RunFolder, tab: str, low: int, high: int
) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        def whole(count: int) -> bool:
            shown = [chart for chart in app.dashboard.query(Chart) if chart.is_on_screen]
            return len(shown) == count and all(chart.size.height >= 7 for chart in shown)

        await pilot.press(tab)
        for height, count in ((22, low), (32, high)):
            await resize(pilot, 120, height)
            await until(pilot, partial(whole, count))

    show(folder.path, drive, (120, 32))


@pytest.mark.parametrize("width", [100, 120])
def test_the_newest_error_rate_is_whole_beside_an_older_one(folder: RunFolder, width: int) -> None:
    for step, split, wer in ((0, "test", 0.302), (0, "validation", 0.264), (30, "validation", 0.258)):
        folder.append(EvaluationEvent(step=step, split=split, metrics={"wer": wer}, samples=8, seconds=1.0))

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await until_text(pilot, "━ validation wer 25.8 %")
        assert "╍ test wer at 0" in text(app)

    show(folder.path, drive, (width, 32))


def test_charts_take_log_scale_smoothing_zoom_and_machines(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("3", "l", "w", "z")
        await until_text(pilot, "smoothed 0.98  log  zoom 2x")
        await pilot.press("m", "left_square_bracket")
        await until_text(pilot, "━ studio  ╍ air  ┅ pc")
        await pilot.press("slash", *"wait", "enter")
        await until_text(pilot, "wait share")

    show(folder.path, drive, (120, 32))


def test_hostile_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    name = "[red]a\x1b[31mb[/]"
    hello = MemberEvent(member=0, time=BEGAN, status="started", name=name, message=name)
    with live(new_folder(tmp_path), [*started(1), hello, *steps(1, 3, ranks=(0,))]) as folder:
        (folder.path / "logs" / "x.log").write_text(f"{name}\n")

        async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
            for key in TABS:
                await pilot.press(key)
                assert "\x1b" not in text(app)
            await pilot.press("5")
            await until_text(pilot, "[red]a\\x1b[31mb[/]")

        show(folder.path, drive)


def test_ascii_is_ascii_on_every_tab(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        for key in TABS:
            await pilot.press(key)
            strips = app.screen._compositor.render_strips()
            for strip in strips:
                filtered = strip.apply_filter(app._filters[-1], app.screen.background_colors[1])
                assert filtered.text.isascii()

    show(folder.path, drive, ascii_only=True)


def test_the_title_says_fast_and_help_by_which_strategy(folder: RunFolder) -> None:
    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        title = lines(app)[0]
        assert title.split()[-1] == "Fast" and not any(name in title for name in ("diloco", "mesh"))
        await pilot.press("question_mark")
        await until_text(pilot, "Fast: diloco over mesh.")

    show(folder.path, drive)


def test_a_request_is_not_sent_twice_before_its_answer(folder: RunFolder) -> None:
    commands = Commands(folder.path)
    assert [commands.ask("pause", now) for now in (0.0, 1.0)] == ["", ""]
    assert len(take_requests(folder.path)) == 1
    assert commands.ask("snapshot", 1.0) == "" and commands.ask("pause", 60.0) == ""
    assert len(take_requests(folder.path)) == 2


def test_every_series_has_its_value_at_80_columns(folder: RunFolder) -> None:
    for step, split in ((0, "test"), (0, "validation"), (30, "validation")):
        folder.append(
            EvaluationEvent(
                step=step, split=split, metrics={"wer": 0.679, "loss": 1.2345}, samples=8, seconds=1.0, time=BEGAN + 31
            )
        )

    async def drive(pilot: Pilot[Any], app: DashboardApp) -> None:
        await pilot.press("3")
        await until_text(pilot, "test wer          67.9 %")
        assert "validation loss    1.234" in text(app)

    show(folder.path, drive)
