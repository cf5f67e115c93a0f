"""When a computer is lent, and how it is given back: hours, mains, its owner's return."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from distributed.joining.lending import presence, resting
from distributed.joining.lending.ledger import LentPrograms, Loan, ended_loans, loans
from distributed.joining.lending.presence import (
    BUSY,
    CALM,
    QUIET,
    InputClock,
    OwnerPresence,
    RestPolicy,
    is_input_hidden,
)
from distributed.joining.lending.resting import LendingWatch, require_limits
from distributed.joining.lending.terms import LendingTerms, in_hours, parse_hours, parse_memory
from profiles.errors import BadInput
from tests.preloaded.python import python_itself
from tests.waiting import until

NOON = 12 * 60
IDLE = RestPolicy(LendingTerms(while_idle=True))


class Owner:
    """Stands for the sensor: what it sees is set by the test."""

    def __init__(self) -> None:
        self.seen = OwnerPresence(NOON, quiet=QUIET)

    def look(self) -> OwnerPresence:
        return self.seen


class Resting:
    """Stands for the connection to a pool."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def rest(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def program() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


@pytest.fixture
def ends() -> Iterator[list[Any]]:
    """Is filled with what is closed at the end."""
    opened: list[Any] = []
    yield opened
    for one in opened:
        one.close()


def watch(program: psutil.Process, owner: Owner, ends: list[Any], **terms: Any) -> tuple[Resting, list[str]]:
    box: Any = SimpleNamespace(processes=lambda: [program], close=program.kill)
    connection, lines = Resting(), list[str]()
    given = LendingTerms(**{"while_idle": True, **terms})
    sensor: Any = owner
    ends.append(LendingWatch(given, box, connection, lines.append, LentPrograms("home", "own"), sensor))
    return connection, lines


@pytest.mark.parametrize("text", ["22-7", " 22:00 - 7:00 "])
def test_hours_go_over_midnight(text: str) -> None:
    hours = parse_hours(text)
    assert hours == (22 * 60, 7 * 60)
    assert [in_hours(hours, minute) for minute in (22 * 60, 0, 7 * 60 - 1, 7 * 60, NOON)] == [True] * 3 + [False] * 2


def test_hours_of_one_day_and_to_its_end() -> None:
    assert in_hours(parse_hours("9-17"), NOON) and not in_hours(parse_hours("9-17"), 17 * 60)
    assert parse_hours("9-24") == (9 * 60, 0) and in_hours((9 * 60, 0), 23 * 60 + 59)


@pytest.mark.parametrize("text", ["", "22", "25-7", "22-7:60", "7-7", "22:0-7", "-1-7", "a-b"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="no span"):
        parse_hours(text)


@pytest.mark.parametrize(("text", "count"), [("8GB", 8 << 30), ("1.5 GiB", 3 << 29), ("2048m", 2 << 30)])
def test_memory_in_words(text: str, count: int) -> None:
    assert parse_memory(text) == count


@pytest.mark.parametrize("text", ["8", "500MB", "GB", "-8GB", "8GB of it"])
def test_memory_that_is_none_or_too_little(text: str) -> None:
    with pytest.raises(BadInput, match="no amount of memory"):
        parse_memory(text)


def test_terms_are_read_as_they_were_written() -> None:
    terms = LendingTerms("tasks", True, (1320, 420), True, 8 << 30, 2)
    document = terms.document()
    assert LendingTerms.parse({**document, "hours": [1320, 420]}) == terms
    for wrong in ({"lend": "all"}, {"hours": [1]}, {"hours": [0, 1440]}, {"memory": -1}, {"while_idle": 1}, {"x": 1}):
        assert LendingTerms.parse({**document, **wrong}) is None
    assert "while nobody uses it, from 22:00 to 07:00, on mains power, at most 8" in terms.limits


def test_it_rests_outside_its_hours_and_on_battery() -> None:
    policy = RestPolicy(LendingTerms(hours=(22 * 60, 7 * 60), on_mains=True))
    assert "other hours" in policy.reason(OwnerPresence(NOON), 0.0)
    assert "battery" in policy.reason(OwnerPresence(0, on_mains=False), 0.0)
    assert policy.reason(OwnerPresence(0, quiet=0.0, others=1.0), 0.0) == ""


def test_any_input_gives_it_back_for_five_minutes() -> None:
    seen = [IDLE.reason(OwnerPresence(NOON, quiet=quiet), 0.0) for quiet in (QUIET, 0.1, QUIET - 1, QUIET, None)]
    assert [bool(reason) for reason in seen] == [False, True, True, False, False]


def test_load_counts_in_two_looks_and_until_it_has_been_calm() -> None:
    policy = RestPolicy(LendingTerms(while_idle=True))
    looks = [(BUSY, 0.0), (0.0, 1.0), (BUSY, 2.0), (BUSY, 3.0), (0.0, 4.0), (0.0, 3.0 + CALM)]
    resting_ = [bool(policy.reason(OwnerPresence(NOON, others=others), at)) for others, at in looks]
    assert resting_ == [False, False, False, True, True, False]


def test_what_runs_stands_still_when_its_owner_returns_and_goes_on(program: psutil.Process, ends: list[Any]) -> None:
    owner = Owner()
    connection, lines = watch(program, owner, ends)
    owner.seen = OwnerPresence(NOON, quiet=0.0)
    until(lambda: program.status() == psutil.STATUS_STOPPED)
    owner.seen = OwnerPresence(NOON, quiet=QUIET)
    until(lambda: program.status() != psutil.STATUS_STOPPED)
    assert connection.reasons == []
    until(lambda: "goes on" in "".join(lines))


def test_input_is_heard_from_the_desktop_and_from_the_keyboard_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = [None, None, 7, 7, 8]
    monkeypatch.setattr(presence, "_interrupts", lambda: interrupts.pop(0))
    monkeypatch.setattr(presence, "_ASK_EVERY", 0.0)
    desktop = [None, 40.0, 40.0, None]
    clock = InputClock(lambda: desktop.pop(0))
    quiet = [clock.quiet() for _ in range(4)]
    assert quiet[0] is None and quiet[1] is not None and quiet[1] < 1.0  # a keyboard was plugged in
    assert quiet[2] is not None and quiet[2] < 1.0 and quiet[3] is not None and quiet[3] < 1.0


def test_a_desktop_that_hides_its_user_is_not_lent_while_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_input_hidden(tmp_path, lambda: None)  # no desktop at all
    (tmp_path / "tmp" / ".X11-unix").mkdir(parents=True)
    (tmp_path / "tmp" / ".X11-unix" / "X0").touch()
    assert is_input_hidden(tmp_path, lambda: None) and not is_input_hidden(tmp_path, lambda: 3.0)
    monkeypatch.setattr(resting, "is_input_hidden", lambda: True)
    with pytest.raises(BadInput, match="does not tell"):
        require_limits(LendingTerms(while_idle=True))
    require_limits(LendingTerms(hours=(1, 2)))


def test_it_looks_four_times_a_second() -> None:
    assert resting.LOOK <= 0.25  # and stops what runs in the same look: within a second


def test_an_owner_who_stays_gets_the_memory_too(
    program: psutil.Process, ends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "FROZEN", 0.0)
    owner = Owner()
    connection, _ = watch(program, owner, ends)
    owner.seen = OwnerPresence(NOON, quiet=0.0)
    until(lambda: connection.reasons == ["its owner is there"])
    owner.seen = OwnerPresence(NOON, quiet=QUIET)
    until(lambda: connection.reasons == ["its owner is there", ""])


def test_it_rests_at_once_where_nothing_runs(ends: list[Any]) -> None:
    box: Any = SimpleNamespace(processes=list)
    connection, sensor = Resting(), Owner()
    sensor.seen = OwnerPresence(NOON, quiet=0.0)
    given: Any = sensor
    terms = LendingTerms(while_idle=True)
    ends.append(LendingWatch(terms, box, connection, lambda line: None, LentPrograms("home", "own"), given))
    until(lambda: connection.reasons == ["its owner is there"])


@pytest.mark.slow
def test_more_memory_than_is_lent_ends_it(ends: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "_ACCOUNT", 0.0)
    script = "import time; data = bytearray(80 << 20); time.sleep(1000)"
    with subprocess.Popen([python_itself(), "-IS", "-c", script]) as process:
        _, lines = watch(psutil.Process(process.pid), Owner(), ends, memory=64 << 20)
        assert process.wait() < 0
    until(lambda: "they were ended" in "".join(lines))


@pytest.mark.slow
def test_what_ran_is_written_down(joining_config: Path) -> None:
    words = [python_itself(), "-IS", "-c", "import time; time.sleep(1000)", "/home/lent", "start", "run-7", "3"]
    (joining_config / "muster").mkdir()
    programs = LentPrograms("home", "tasks")
    with subprocess.Popen(words) as process:
        processes = [psutil.Process(process.pid)]
        programs.account(processes)
        ((_, running),) = loans(processes, "home", "tasks")
        assert running.is_running and ended_loans() == []
        process.kill()
    programs.account([])
    (loan,) = ended_loans()
    assert (loan.pool, loan.lend, loan.run, loan.rank, loan.is_running) == ("home", "tasks", "run-7", "3", False)
    assert loan.began <= time.time()


def test_a_file_that_others_have_changed_shows_what_can_be_read(joining_config: Path) -> None:
    from distributed.hosts.joined import joining_folder

    (joining_folder() / "lent.jsonl").write_text('{"pool": 1}\nnonsense\n[]\n')
    assert ended_loans() == []
    assert Loan("a", "own", "r", "0", 0.0, 1.0, 1.0) not in ended_loans()
