"""``ask`` and ``stop``: a live run on this machine, left in the background and commanded from another terminal."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.cli.runs import attach
from app.cli.runs.ask import answer_to, find_live_run
from profiles.errors import RunFailed
from tests.distributed.muster_runs import Muster
from tests.report.report_runs import write_run
from training.records.event_log import newest_number
from training.records.events import MemberEvent, RequestEvent, RunEvent
from training.records.run_folder import RunFolder
from training.run.processes import BackgroundProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_run_of_this_machine_obeys_another_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    muster = Muster(tmp_path, tmp_path / "none.json", pause=0.05)
    words = [word for word in muster.train("--max-steps", "20000") if word not in ("--hosts", str(muster.hosts_file))]
    output = tmp_path / "output"

    def ask(*arguments: str) -> dict[str, object]:
        assert main(["ask", "nanogpt", *arguments, "--output", str(output), "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    started = muster.run(*words, "--local", "2", "--detach")
    run_id = started.stdout.strip()
    assert (started.returncode, run_id) == (0, next(output.iterdir()).name[:20]), started.stderr
    muster.until_step(run_id, 3, members=2)
    assert ask("snapshot")["outcome"] == "done"
    assert str(ask("pause")["message"]).startswith("the run is paused after step ")
    assert ask("snapshot")["outcome"] == "done"
    assert ask("resume")["outcome"] == "done"
    assert ask("drop", "worker-1")["machine"] == "worker-1"
    assert main(["ask", "nanogpt", "drop", "worker-7", "--output", str(output)]) == 1
    assert "known: worker-0, worker-1" in capsys.readouterr().out
    assert main(["stop", "nanogpt", "--output", str(output)]) == 0
    kept, left = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"stopped; the snapshot of step \d+ is kept, 0 steps lost", kept)
    assert left == "this machine: nothing left running"
    assert RunFolder.open(muster.folder_of(run_id)).metadata.status == "cancelled"


def test_what_cannot_begin_in_the_background_says_why(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [])
    (folder / "plan.json").write_text("{")
    with pytest.raises(RunFailed, match="the run did not start: .*plan.json"):
        BackgroundProcess("app.cli.train.local_run").start(folder)


def test_a_run_without_logs_is_said_to_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, [])
    assert main(["logs", folder.name[:20], "--output", str(tmp_path)]) == 0  # it is no error
    assert f"run {folder.name}: its machines wrote no log" in capsys.readouterr().err


def test_of_two_resumes_at_once_neither_takes_the_end_before_for_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, [RunEvent(status="running"), RunEvent(status="cancelled", message="stopped")])
    since, look, started = newest_number(folder / "events.jsonl"), attach._seen_until_start, list[RunFolder]()

    def look_before_it_begins(*words: Any) -> Any:
        seen = look(*words)
        if not started:  # what the other one has started
            started.append(others.enter_context(RunFolder.take_over(folder)))
            started[0].append(MemberEvent(member=0, status="started", name="worker-0"))
        return seen

    monkeypatch.setattr(attach, "_seen_until_start", look_before_it_begins)
    with ExitStack() as others:
        assert attach.leave(folder, False, since) == 0
    assert "runs in the background" in capsys.readouterr().err


def test_a_start_that_fails_before_its_workers_is_told_though_nobody_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path, [], status="failed", error_message="cannot listen on 127.0.0.1:29500")
    assert attach.leave(folder, False) == 1
    assert "error: cannot listen on 127.0.0.1:29500" in capsys.readouterr().err


def test_nobody_answers_for_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from app.demo.services import write_demo_run

    folder = write_demo_run(tmp_path, machines=1)
    assert main(["ask", str(folder), "pause"]) == 2
    assert "no process is running" in capsys.readouterr().err


def test_stop_without_a_run_takes_the_live_one_and_never_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path, [], name=name) for name in ("ended", "first", "second")]
    assert main(["stop", "--output", str(tmp_path)]) == 2
    assert "no run is going on" in capsys.readouterr().err
    with RunFolder.take_over(runs[1]):
        assert find_live_run(tmp_path) == runs[1]
        with RunFolder.take_over(runs[2]):
            assert main(["stop", "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "2 runs are going on" in error
    assert all(run.name in error for run in runs[1:]) and runs[0].name not in error


def test_who_adds_a_machine_to_a_paused_run_is_told_why_it_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [
        RunEvent(status="paused"),
        RequestEvent(request="1", action="add", machine="b", outcome="accepted"),
        RequestEvent(request="1", action="add", machine="b", outcome="done", message="trains with the others"),
    ]
    folder = write_run(tmp_path, said)
    assert answer_to(folder, "1").outcome == "done"
    assert re.search(r"the run is paused; the machine joins when it resumes: .* ask .* resume", capsys.readouterr().err)
