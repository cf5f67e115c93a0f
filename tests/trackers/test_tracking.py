"""A run's events at its trackers: every one once, whatever breaks; read back by the libraries' own readers."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.trackers.kinds import KINDS, by_name, cell, columns, scalars_of
from app.trackers.tracking import Tracking, checked_trackers, start_trackers
from cli_typer import main
from profiles.errors import BadInput
from profiles.installation import package_line
from profiles.run_settings import TRACKERS
from tests.app.app_events import MEMBER_EVENTS, RUN_EVENTS, evaluation, step, sync
from tests.report.report_runs import write_run
from tests.waiting import until
from training.records.events import Event, KnownEvent, MachineEvent, RunEvent
from training.records.run_folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs {package}: pip install -e '.[trackers]'")


def some_events() -> list[Event]:
    load = MachineEvent(member=1, cpu_percent=50, memory_used=10, memory_total=20, time=3)
    steps = [step(n, member=rank, time=float(n), loss=rank + 1 / n) for n in range(1, 6) for rank in (0, 1)]
    return [evaluation(0, 0.9), *steps, sync(1), load, evaluation(5, 0.2)]


def rows(run: Path, kind: str) -> list[dict[str, str]]:
    with (run / "trackers" / "csv" / f"{kind}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def track(run: Path, *names: str) -> list[str]:
    said: list[str] = []
    Tracking(run, names, said.append).follow()
    return said


def test_csv_holds_every_event_once_however_often_it_is_tracked(tmp_path: Path) -> None:
    run = write_run(tmp_path, some_events())
    for _ in range(2):
        assert track(run, "csv") == []
    steps = rows(run, "step")
    assert [(row["step"], row["name"]) for row in steps] == [
        (str(n), f"worker-{r}") for n in range(1, 6) for r in (0, 1)
    ]
    assert [float(row["loss"]) for row in steps][:4] == [1.0, 2.0, 0.5, 1.5]
    measured = [(row["step"], row["metric"], float(row["value"])) for row in rows(run, "evaluation")]
    assert measured == [("0", "loss", 1), ("0", "wer", 0.9), ("5", "loss", 1), ("5", "wer", 0.2)]
    assert {path.suffix for path in (run / "trackers" / "csv").iterdir()} == {".csv", ".lock", ""}


def test_a_run_that_goes_on_later_is_continued(tmp_path: Path) -> None:
    run = write_run(tmp_path, some_events())
    track(run, "csv")
    with RunFolder.take_over(run) as folder:
        folder.append(step(6))
    track(run, "csv")
    assert [row["step"] for row in rows(run, "step")][-2:] == ["5", "6"]


def test_every_kind_of_event_has_its_file() -> None:
    kinds = {kind.model_fields["kind"].default for kind in get_args(get_args(KnownEvent)[0])}
    assert set(columns()) == kinds
    assert all(len(set(names)) == len(names) for names in columns().values())


@given(st.text())
def test_no_text_becomes_a_formula_or_a_second_line(text: str) -> None:
    shown = str(cell(text))
    assert not shown.startswith(("=", "+", "-", "@"))
    assert "\n" not in shown and "\x1b" not in shown


@given(st.lists(MEMBER_EVENTS | RUN_EVENTS, max_size=20), st.integers(0, 100))
def test_any_event_gives_finite_figures_with_names_of_their_own(events: list[Event], newest: int) -> None:
    for event in events:
        found = list(scalars_of(event, newest))
        _, named = by_name(event, newest, lambda rank: f"member-{rank}")
        assert len(named) == len(found)
        assert all(abs(one.value) < float("inf") for one in found)


def test_tensorboards_own_reader_finds_the_same_figures(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    again = [RunEvent(status="starting", time=50), step(4, time=51, loss=9.0), step(5, time=52, loss=8.0)]
    run = write_run(tmp_path, [*some_events(), *again])
    assert track(run, "tensorboard") == []

    def read(name: str) -> Any:
        reader = event_accumulator.EventAccumulator(str(run / "trackers" / "tensorboard" / name))
        reader.Reload()
        return reader

    losses = [(one.step, one.value, one.wall_time) for one in read("worker-1").Scalars("train/loss")]
    assert losses[:3] == [(1, 2.0, 1.0), (2, 1.5, 2.0), (3, pytest.approx(4 / 3), 3.0)]
    resumed = [(one.step, one.value) for one in read("worker-0").Scalars("train/loss")]
    assert resumed == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 9.0), (5, 8.0)], "steps done again replace"
    assert [(one.step, one.value) for one in read("run").Scalars("validation/wer")] == [
        (0, pytest.approx(0.9)),
        (5, pytest.approx(0.2)),
    ]
    assert read("worker-1").Scalars("machine/cpu_percent")[0].step == 5
    assert "settings" in read("run").Tags()["tensors"]


@needs("wandb")
def test_wandb_offline_holds_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = write_run(tmp_path, some_events())
    assert track(run, "wandb") == []
    (file,) = (run / "trackers" / "wandb").glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for name in (b"train/loss/worker-0", b"train/loss/worker-1", b"validation/wer"):
        assert name in content


@needs("trackio")
def test_trackios_data_base_holds_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "trackio"
    run = write_run(tmp_path, some_events())
    environment = {**os.environ, "TRACKIO_DIR": str(folder), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "app.trackers.tracking", "trackio"]
    done = subprocess.run(command, cwd=ROOT, env=environment, input=os.fsencode(run), timeout=100, check=False)
    assert done.returncode == 0, (run / "logs" / "trackers.log").read_text()
    with sqlite3.connect(folder / "muster.db") as base:
        found = [json.loads(row[0]) for row in base.execute("select metrics from metrics order by step, id")]
    base.close()
    assert [one["train/loss/worker-0"] for one in found if "train/loss/worker-0" in one] == [
        1,
        1 / 2,
        1 / 3,
        1 / 4,
        1 / 5,
    ]


def test_a_tracker_that_fails_is_let_go_of_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, run: object, folder: Path) -> None: ...

        def log(self, event: Event, newest_step: int) -> None:
            raise RuntimeError("\x1b[31mno room")

        def close(self, status: str) -> str:
            raise RuntimeError("again")

    broken: Any = Broken
    monkeypatch.setitem(KINDS, "wandb", broken)
    run = write_run(tmp_path, some_events())
    said = track(run, "wandb", "csv")
    assert said == ["wandb: stopped sending after an error: RuntimeError: \\x1b[31mno room"]
    assert len(rows(run, "step")) == 10


def test_two_at_once_do_not_write_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path, some_events())
    Tracking(run, ["csv"], print)
    with pytest.raises(BadInput, match="no tracker could be opened"):
        Tracking(run, ["csv"], print)


def test_every_name_of_the_option_is_a_tracker() -> None:
    assert set(KINDS) == set(TRACKERS)


def test_a_missing_library_is_said_with_the_command_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    absent = ("wandb", "trackio")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name in absent else find_spec(name, *rest)
    )
    with pytest.raises(BadInput, match="wandb, trackio is not installed") as caught:
        checked_trackers("csv, wandb,trackio")
    assert caught.value.hint == package_line("wandb", "trackio")
    monkeypatch.chdir(tmp_path)
    assert main(["distributed-train", "demo-scratch", "--local", "1", "--trackers", "wandb"]) == 2
    assert package_line("wandb") in capsys.readouterr().err
    assert not (tmp_path / "output").exists()
    assert main(["distributed-train", "demo-scratch", "--local", "1", "--trackers", "cvs"]) == 2
    assert "'cvs' is none of csv, tensorboard" in capsys.readouterr().err


def test_the_command_names_where_the_figures_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, some_events())
    assert main(["track", str(run), "--to", "csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trackers"] == {"csv": str(run / "trackers" / "csv")}
    assert main(["track", str(run), "--to", ","]) == 2


def test_the_process_follows_a_live_run_outlives_signals_and_ends_with_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, some_events())
    with RunFolder.take_over(run) as folder:
        folder.update_metadata(status="running")
        start_trackers(run, ["csv"])
        until(lambda: (run / "trackers" / "csv" / "position").exists())
        process = int((run / "trackers" / "csv" / "run.lock").read_text())
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(process, number)
        folder.append(step(6))
        until(lambda: rows(run, "step")[-1]["step"] == "6")
        assert os.getsid(process) == process
        folder.finish("completed", {})
    until(lambda: "csv: " in (run / "logs" / "trackers.log").read_text())
