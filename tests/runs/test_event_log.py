from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.records.event_log import EventLog, read_events
from training.records.events import Event, MemberEvent, UnknownEvent, WarningEvent, to_line

EVENTS: list[Event] = [MemberEvent(member=n, status="ready", name=f"räum-{n}", time=1.0 * n, seq=n) for n in range(4)]
BYTES = b"".join((to_line(event) + "\n").encode() for event in EVENTS)


def messages(path: Path) -> list[str]:
    return [event.message for event in read_events(path) if isinstance(event, WarningEvent)]


def test_events_come_back_in_order_with_their_numbers(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl")
    written = [log.append(WarningEvent(message=str(n))) for n in range(3)]
    assert [event.seq for event in written] == [0, 1, 2]
    assert list(read_events(tmp_path / "e.jsonl")) == written


def test_numbers_go_on_after_reopening(tmp_path: Path) -> None:
    for expected in (0, 1):
        log = EventLog(tmp_path / "e.jsonl")
        assert log.append(WarningEvent(message="x")).seq == expected
        log.close()


def test_number_is_found_behind_a_long_unnumbered_tail(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"kind":"warning","message":"x","seq":41}\n' + "not an event\n" * 10_000)
    assert EventLog(path).append(WarningEvent(message="y")).seq == 42


@given(cut=st.integers(0, len(BYTES)))
def test_a_log_torn_at_any_byte_still_reads(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "e.jsonl"
    path.write_bytes(BYTES[:cut])
    whole = BYTES[:cut].count(b"\n")
    seen = list(read_events(path))
    assert seen[:whole] == EVENTS[:whole]
    assert len(seen) <= whole + 1


@given(cut=st.integers(0, len(BYTES)))
def test_writing_on_after_a_tear_at_any_byte_loses_only_the_torn_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "e.jsonl"
    path.write_bytes(BYTES[:cut])
    whole = BYTES[:cut].count(b"\n")
    log = EventLog(path)
    added = log.append(WarningEvent(message="on"))
    log.close()
    assert added.seq == whole
    assert list(read_events(path)) == [*EVENTS[:whole], added]


@given(garbage=st.binary(max_size=60))
def test_damage_inside_costs_only_the_damaged_lines(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    path = tmp_path_factory.mktemp("damaged") / "e.jsonl"
    path.write_bytes(BYTES + garbage + b"\n" + BYTES)
    known = [event for event in read_events(path) if not isinstance(event, UnknownEvent)]
    assert known == EVENTS * 2


def test_deeply_nested_json_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"kind":' + b"[" * 100_000 + b"\n" + BYTES)
    assert len(list(read_events(path))) == len(EVENTS)


def test_a_missing_log_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none.jsonl")) == []


FILL = """
import resource, signal, sys
from pathlib import Path
from profiles.errors import RunFailed
from training.records.event_log import EventLog
from training.records.events import WarningEvent
log = EventLog(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
complaints = []
for n in range(40):
    try:
        log.append(WarningEvent(message=f"{n:050d}"))
    except RunFailed as error:
        complaints.append(str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.append(WarningEvent(message="space again"))
print(len(complaints), complaints[0])
"""


@pytest.mark.slow
def test_a_full_disk_is_told_once_and_writing_goes_on_when_there_is_space(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 ")
    assert "the disk is full" in done.stdout
    assert path.read_bytes().count(b"\n") == len(list(read_events(path)))
    assert messages(path)[-1] == "space again"
