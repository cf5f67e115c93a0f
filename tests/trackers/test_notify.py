"""Who hears when a run ends, fails or loses a machine: a real command, a real web address."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app.trackers import notify, tracking
from app.trackers.tracking import Tracking
from cli_typer import main
from profiles.errors import BadInput, StoppedByUser
from profiles.installation import NOTIFICATION_TARGET
from tests.app.app_events import evaluation
from tests.report.report_runs import write_run
from tests.waiting import until
from training.records.events import ErrorEvent, Event, MemberEvent, RunEvent
from training.records.run_folder import RunFolder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which the command that hears writes a line for each message: status and text."""
    heard = tmp_path / "heard"
    program = tmp_path / "hear me.py"
    program.write_text(
        "import os, sys\n"
        f"with open({str(heard)!r}, 'a') as file: print(os.environ['MUSTER_STATUS'], sys.argv[-1], file=file)\n"
    )
    monkeypatch.setenv(NOTIFICATION_TARGET, shlex.join([sys.executable, str(program)]))
    return heard


def follow(run: Path) -> None:
    Tracking(run, ["notify"], print).follow()


def lost(rank: int) -> Event:
    return MemberEvent(member=rank, time=3.0, status="lost", name="studio", message="no sign of life for 10 s")


def test_a_command_hears_of_a_lost_machine_and_of_the_result(tmp_path: Path, command: Path) -> None:
    run = write_run(tmp_path, [evaluation(0, 0.9), lost(1), evaluation(5, 0.2)])
    follow(run)
    first, last = command.read_text().splitlines()
    assert first.startswith("running Muster, ")
    assert first.endswith("studio is lost (no sign of life for 10 s); the others go on")
    assert re.search(r"^completed .*completed: trained \d+:\d\d; validation: WER 20\.0 %", last)


def test_each_message_is_sent_once_however_often_the_trackers_start(tmp_path: Path, command: Path) -> None:
    run = write_run(tmp_path, [lost(1)])
    follow(run)
    follow(run)
    assert len(command.read_text().splitlines()) == 2  # the loss, the end


def test_what_a_failing_command_does_not_hear_is_no_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    heard, program = tmp_path / "heard", tmp_path / "fails.py"
    program.write_text(
        f"import sys\nwith open({str(heard)!r}, 'a') as file: print(sys.argv[-1], file=file)\nsys.exit(3)"
    )
    monkeypatch.setenv(NOTIFICATION_TARGET, shlex.join([sys.executable, str(program)]))
    follow(write_run(tmp_path, [lost(1), evaluation(5, 0.2)]))
    first, last = heard.read_text().splitlines()  # each is tried once, and nobody hears of a failure
    assert "is lost" in first and "completed" in last
    assert capfd.readouterr().err.count("(exit code 3)") == 2


def test_a_run_that_could_not_begin_and_left_no_folder_is_told_with_its_reason(tmp_path: Path, command: Path) -> None:
    run = write_run(tmp_path, [ErrorEvent(time=1.0, message="no clip is long enough")])
    tracked = Tracking(run, ["notify"], print)
    with RunFolder.take_over(run):
        thread = threading.Thread(target=tracked.follow)
        thread.start()
        until(lambda: tracked._follower._attempt.error)
        shutil.rmtree(run)
    thread.join()
    assert command.read_text().endswith(": failed before its first step: no clip is long enough\n")


def test_a_run_whose_process_died_is_told_as_failed(tmp_path: Path, command: Path) -> None:
    run = write_run(tmp_path, [])
    with RunFolder.take_over(run) as folder:
        folder.append(RunEvent(status="starting"))
        folder.update_metadata(status="running")
    follow(run)
    assert command.read_text().endswith(" failed: interrupted: the process that ran it is gone\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BadInput("no room on the disk"), "failed Muster, demo: failed before its first step: no room on the disk\n"),
        (KeyboardInterrupt(), "cancelled Muster, demo: was stopped before its first step\n"),
    ],
)
def test_a_start_that_ends_before_there_is_a_run_is_told(command: Path, error: BaseException, message: str) -> None:
    with pytest.raises(type(error)), notify.failed_start_notified("demo"):
        raise error
    assert command.read_text() == message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_is_killed_is_told(number: signal.Signals, command: Path) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores some, and all that it starts
    try:
        with pytest.raises(StoppedByUser), notify.failed_start_notified("demo"):
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert command.read_text() == "cancelled Muster, demo: was stopped before its first step\n"


def test_the_command_line_tells_of_a_refused_start(tmp_path: Path, command: Path) -> None:
    assert main(["distributed-train", "demo-scratch", "--local", "1", "--dataset", str(tmp_path / "nothing")]) == 2
    assert command.read_text().startswith("failed Muster, demo-scratch: failed before its first step: ")


def test_a_run_that_was_gone_before_its_trackers_began_is_told(
    tmp_path: Path, command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "run_from_stdin", lambda log: tmp_path / "20261128-101500-aaaa-demo")
    monkeypatch.setattr("os.nice", lambda level: None)
    assert tracking.main("csv,notify") == 2
    assert command.read_text() == "failed Muster, 20261128-101500-aaaa-demo: failed before its first step\n"


def test_a_web_address_that_hangs_once_gets_the_end(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTIFICATION_TARGET, address)
    send, patience = urllib.request.urlopen, iter([0.2, 60.0])
    monkeypatch.setattr(urllib.request, "urlopen", lambda request, timeout: send(request, timeout=next(patience)))
    _Listener.hangs = 1
    follow(write_run(tmp_path, [lost(1), evaluation(5, 0.2)]))
    assert [document["status"] for document in _Listener.heard] == ["completed"]


class _Listener(BaseHTTPRequestHandler):
    heard: list[dict[str, str]] = []  # noqa: RUF012 - one listener a test
    hangs = 0
    """Messages that get no answer."""

    def do_POST(self) -> None:
        if _Listener.hangs:
            _Listener.hangs -= 1
            self.rfile.read()  # until who sent it has gone
            return
        self.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    _Listener.heard.clear()
    with HTTPServer(("127.0.0.1", 0), _Listener) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_web_address_gets_a_document(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTIFICATION_TARGET, address)
    follow(write_run(tmp_path, [evaluation(5, 0.2)]))
    (document,) = _Listener.heard
    assert document["status"] == "completed"
    assert document["text"] == document["content"]
    assert "completed" in document["text"]


@pytest.mark.parametrize(
    "target",
    ["no-such-program --loud", "'unbalanced", "desktop", "http://", "https:///x", "https://a b", "https://me:word@a/b"],
)
def test_what_cannot_hear_is_refused_before_a_run(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(NOTIFICATION_TARGET, raising=False)
    with pytest.raises(BadInput, match="notify: "):
        notify.choose(target)
    assert not notify.is_requested()
