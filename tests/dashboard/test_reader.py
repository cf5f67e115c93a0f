from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_folders import BEGAN, live, new_folder, started, steps

from app.dashboard.reader import RunReader
from app.run_view.run_series import of_run
from tests.waiting import until
from training.records.events import ErrorEvent, RunEvent


@contextmanager
def reading(path: Path, **named: float) -> Iterator[RunReader]:
    reader = RunReader(path, **named)
    reader.start()
    try:
        yield reader
    finally:
        reader.close()


def curve(reader: RunReader) -> list[tuple[float, float]]:
    return [(point.step, point.mean) for point in of_run(reader.picture.state.curves, "loss").points()]


WHOLE = [(float(step), pytest.approx(2.0 / step)) for step in range(1, 31)]


def test_who_comes_late_sees_the_whole_curve_without_a_gap_or_a_double(tmp_path: Path) -> None:
    with live(new_folder(tmp_path), [*started(), *steps(1, 10)]) as run, reading(run.path) as first:
        until(lambda: first.picture.read)
        for event in steps(11, 20):
            run.append(event)
        with reading(run.path) as second:
            for event in steps(21, 30):
                run.append(event)
            until(lambda: len(curve(first)) == len(curve(second)) == 30)
            assert curve(first) == curve(second) == WHOLE
    with reading(run.path) as third:
        until(lambda: third.picture.read)
        assert curve(third) == WHOLE


def test_steps_that_are_done_again_after_a_resume_are_no_doubles(tmp_path: Path) -> None:
    again = [RunEvent(time=BEGAN + 50, status="starting"), *steps(16, 30, at=BEGAN + 40)]
    with live(new_folder(tmp_path), [*started(), *steps(1, 20), *again]) as run, reading(run.path) as reader:
        until(lambda: reader.picture.read)
        assert curve(reader) == WHOLE


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    with live(new_folder(tmp_path), started()) as run:
        half, rest = b'{"kind":"warning","time":1.0,"mess', b'age":"whole"}\n'
        with (run.path / "events.jsonl").open("ab", buffering=0) as stream, reading(run.path) as reader:
            stream.write(b"not json\n" + half)
            until(lambda: reader.picture.read)
            assert reader.picture.state.warnings == ()
            stream.write(rest)
            until(lambda: reader.picture.state.warnings)


def test_a_damaged_folder_is_said_and_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    with live(new_folder(tmp_path), [*started(), *steps(1, 5)]) as run:
        pass
    (run.path / "plan.json").write_text("{")
    with reading(run.path) as reader:
        until(lambda: reader.picture.read)
        assert "plan.json" in reader.picture.damage
        assert reader.picture.state.step == 5


def test_a_folder_with_nothing_in_it(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        until(lambda: reader.picture.read)
        assert reader.picture.damage


def test_a_supervisor_that_is_killed_is_noticed(tmp_path: Path) -> None:
    """A run that is held counts as alive however long nobody has looked: a busy machine is no sign of its end."""
    with live(new_folder(tmp_path), [*started(), *steps(1, 5)]) as run, reading(run.path, grace=0.0) as reader:
        until(lambda: reader.picture.read)
        assert reader.picture.live
        run.close()
        until(lambda: not reader.picture.live)
        until(lambda: reader.picture.ended)
        assert reader.picture.ended is not None and reader.picture.ended.outcome.exit_code == 1
        state = reader.picture.state
        assert (state.status, {member.status for member in state.members.values()}) == ("interrupted", {"stopped"})


def test_a_run_that_another_terminal_resumes_goes_on_in_a_dashboard_that_stayed_open(tmp_path: Path) -> None:
    stopped = RunEvent(status="cancelled", message="stopped by the user", time=BEGAN + 6)
    with live(new_folder(tmp_path), [*started(), *steps(1, 5), stopped]) as run, reading(run.path) as reader:
        until(lambda: reader.picture.read)
        run.close()
        until(lambda: reader.picture.ended)
        with live(run.path, [*started(at=BEGAN + 60), *steps(6, 8, at=BEGAN + 60)]):
            until(lambda: reader.picture.state.step == 8)
            assert (reader.picture.ended, reader.picture.state.status, len(curve(reader))) == (None, "running", 8)


def test_a_former_run_of_the_same_profile_is_laid_under(tmp_path: Path) -> None:
    with live(new_folder(tmp_path, run_id="20260101-000000-abcd"), [*started(), *steps(1, 5, loss=9.0)]):
        pass
    with live(new_folder(tmp_path), started()) as run, reading(run.path) as reader:
        until(lambda: reader.picture.plan)
        reader.next_former()
        until(lambda: reader.picture.former)
        assert reader.picture.former is not None
        assert [point.mean for point in reader.picture.former.curves["loss"].points()] == [9.0] * 5


def test_the_reader_holds_nothing_that_the_run_needs(tmp_path: Path) -> None:
    """A run ends, and its folder can be taken again, while somebody reads it."""
    path = new_folder(tmp_path)
    with live(path, started()) as run, reading(path) as reader:
        until(lambda: reader.picture.read)
        run.append(ErrorEvent(time=BEGAN, message="x"))
        run.close()
        with live(path, steps(1, 3)):
            until(lambda: reader.picture.state.errors)
