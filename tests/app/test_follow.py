"""Following a run by its folder alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.follow import Follower
from profiles.errors import ExitCode
from profiles.files.resolve import profile_from_options
from training.records.bounded_fields import LONGEST_LINE
from training.records.event_log import follow_lines
from training.records.events import ErrorEvent, Event, RunEvent, WarningEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.outcome import RunOutcome, write_end


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    plan = plan_local_run(profile_from_options("p", {"task": "custom", "model_path": "a.b:c"}), 1)
    with RunFolder.create(tmp_path / "output", plan, []) as made:
        yield made


def seen(follower: Follower) -> list[Event]:
    return [event for event in follower.events() if event is not None]


def end_of(folder: RunFolder) -> RunOutcome:
    """How a run that nobody works on any more ended."""
    folder.close()
    follower = Follower(folder.path)
    seen(follower)
    return follower.outcome()


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    going = iter([True, True, False])
    lines = follow_lines(path, lambda: next(going))
    assert next(lines) == b"one"
    with path.open("ab") as stream:
        stream.write(b"o\nthree\nhalf")
    assert [line for line in lines if line] == [b"two", b"three"]


def test_a_line_without_end_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (2 * LONGEST_LINE) + b"\nend\n")
    lines = [line for line in follow_lines(path, lambda: False) if line]
    assert lines[-1] == b"end" and max(map(len, lines)) < 2 * LONGEST_LINE
    assert b"".join(lines[:-1]) == b"x" * (2 * LONGEST_LINE)


def test_readers_see_what_is_written_while_they_read(folder: RunFolder) -> None:
    follower = Follower(folder.path)
    events = follower.events()
    assert next(events) is None
    folder.append(WarningEvent(message="late"))
    assert next(event for event in events if event is not None).seq == 0
    folder.finish("completed", {"steps": 3})
    folder.close()
    assert [event for event in events if event is not None] == []
    ended = follower.outcome()
    assert (ended.status, ended.exit_code, ended.metrics) == ("completed", ExitCode.DONE, {"steps": 3})


def test_two_readers_at_once_see_the_same(folder: RunFolder) -> None:
    followers = [Follower(folder.path) for _ in range(2)]
    results: list[list[Event]] = [[], []]
    threads = [threading.Thread(target=lambda i=i: results[i].extend(seen(followers[i]))) for i in range(2)]
    for thread in threads:
        thread.start()
    for number in range(50):
        folder.append(WarningEvent(message=str(number)))
    folder.finish("completed", {})
    folder.close()
    for thread in threads:
        thread.join(60)
    assert results[0] == results[1]
    assert [event.seq for event in results[0]] == list(range(50))


def test_a_run_without_its_supervisor_is_said_to_be_interrupted(folder: RunFolder) -> None:
    folder.append(RunEvent(status="running"))
    ended = end_of(folder)
    assert ended.exit_code == ExitCode.RUN_FAILED
    assert ended.message.startswith("interrupted")


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.NOT_READY])
def test_what_could_not_begin_keeps_its_exit_code_even_without_a_folder(folder: RunFolder, code: ExitCode) -> None:
    follower = Follower(folder.path)
    events = follower.events()
    assert next(events) is None
    folder.append(ErrorEvent(message="no such file", hint="look", exit_code=int(code)))
    folder.close()
    shutil.rmtree(folder.path)
    list(events)
    ended = follower.outcome()
    assert (ended.message, ended.hint, ended.exit_code) == ("no such file", "look", code)


def test_the_error_of_an_earlier_attempt_is_forgotten(folder: RunFolder) -> None:
    folder.append(ErrorEvent(message="old", hint="old hint"))
    folder.append(RunEvent(status="starting"))
    folder.finish("cancelled", {})
    ended = end_of(folder)
    assert (ended.hint, ended.exit_code) == ("", ExitCode.STOPPED)


def test_a_resume_that_does_not_begin_ends_with_its_own_cause_though_the_run_is_as_before(folder: RunFolder) -> None:
    folder.append(RunEvent(status="running"))
    folder.finish("cancelled", {"steps": 9}, "stopped")
    folder.close()
    with RunFolder.resume(folder.path, folder.plan(), []) as again:
        again.append(RunEvent(status="starting"))
        again.append(ErrorEvent(message="no data", hint="look", exit_code=int(ExitCode.BAD_INPUT)))
        write_end(again, again.append, "failed", ExitCode.BAD_INPUT, "no data")
    ended = end_of(folder)
    assert (ended.status, ended.message, ended.hint, ended.exit_code) == ("failed", "no data", "look", 2)
    assert RunFolder.open(folder.path).metadata.status == "cancelled"
