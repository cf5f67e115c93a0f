from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.cli.main import main
from app.dashboard.log_book import (
    BYTES_A_LOOK,
    BYTES_COUNTED,
    KEPT_LINES,
    LONGEST_LINE,
    LogBook,
    RunNotices,
    level_of,
    time_of,
)
from app.run_view.view import read_view
from tests.report.report_runs import write_run
from training.records.events import ErrorEvent, MemberEvent, WarningEvent


def write(folder: Path, name: str, text: bytes) -> None:
    with (folder / f"{name}.log").open("ab") as stream:
        stream.write(text)


def texts(book: LogBook) -> list[str]:
    book.look()
    return [f"{line.machine}: {line.text}" for line in book.lines]


def test_lines_are_shown_when_they_are_whole_and_once(tmp_path: Path) -> None:
    book = LogBook(tmp_path)
    write(tmp_path, "a", b"one\ntw")
    assert texts(book) == ["a: one"]
    write(tmp_path, "a", b"o\n")
    write(tmp_path, "b", b"three\n")
    assert texts(book) == ["a: one", "a: two", "b: three"]
    assert not book.omits_lines


def test_a_flood_costs_no_more_than_its_end(tmp_path: Path) -> None:
    book = LogBook(tmp_path)
    for number in range(5):
        write(tmp_path, "a", b"".join(b"line %d of block %d\n" % (n, number) for n in range(20_000)))
        book.look()
    assert len(book.lines) <= KEPT_LINES
    assert book.lines[-1].text == "line 19999 of block 4"
    assert any("too quick to show" in line.text for line in book.lines)
    assert book.omits_lines


def test_lines_that_were_too_quick_to_show_are_counted(tmp_path: Path) -> None:
    book = LogBook(tmp_path)
    write(tmp_path, "a", b"ERROR hot\nWARNING warm\n" + b"fine\n" * (2 * BYTES_COUNTED // 5) + b"half a li")
    assert book.look([("b", "WARNING b lost")])
    assert not book.totals.is_complete and " counted so far: 1 error, 2 warnings" in book.totals.text()
    while not book.totals.is_complete:
        assert book.look()
    assert book.totals.by_machine["a"] == {"error": 1, "warning": 1, "info": 2 * BYTES_COUNTED // 5}
    assert book.totals.text("b") == "in all 1 line: 0 errors, 1 warning" and not book.look()


def test_one_machine_does_not_bury_what_another_says(tmp_path: Path) -> None:
    book = LogBook(tmp_path)
    write(tmp_path, "quiet", b"the link is down\n")
    for _ in range(10):
        write(tmp_path, "loud", b"blah\n" * KEPT_LINES)
        book.look()
    assert "quiet: the link is down" in texts(book)


def test_one_look_reads_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    write(tmp_path, "a", b"x" * 99 + b"\n")
    write(tmp_path, "a", (b"y" * 99 + b"\n") * 10_000)
    book = LogBook(tmp_path)
    book.look()
    assert sum(len(line.text) + 1 for line in book.lines) <= BYTES_A_LOOK + 200


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    book = LogBook(tmp_path)
    for _ in range(20):
        write(tmp_path, "a", b"z" * 10_000)
        book.look()
    assert all(len(line.text) <= LONGEST_LINE + 3 for line in book.lines)


def test_a_file_that_is_begun_again_is_read_from_its_start(tmp_path: Path) -> None:
    book = LogBook(tmp_path)
    write(tmp_path, "a", b"a long line of the first attempt\n")
    book.look()
    (tmp_path / "a.log").write_bytes(b"new\n")
    assert texts(book)[-1] == "a: new"


def test_lines_that_say_their_time_are_merged_by_it(tmp_path: Path) -> None:
    write(tmp_path, "a", b"2026-01-01T09:00:00.500Z first\n2026-01-01T09:00:03Z third\n")
    write(tmp_path, "b", b"2026-01-01T09:00:01Z second\nof two lines\n")
    assert texts(LogBook(tmp_path)) == ["a: first", "b: second", "b: of two lines", "a: third"]


def test_the_command_writes_what_the_tab_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machines' lines by their times, and among them losses, returns and warnings, which no machine logs itself."""
    begun = [MemberEvent(member=rank, time=0.0, status="started", name=f"m{rank}") for rank in (0, 1)]
    lost = [MemberEvent(member=1, time=86_400.0 + n, status="lost", message=f"silent {n}") for n in (1, 4)]
    back = [MemberEvent.model_validate({"member": 1, "time": 86_402.0, "status": s}) for s in ("started", "ready")]
    warned = [
        WarningEvent(time=86_402.5, message="m1: found at 10.0.0.9 by its host key"),
        ErrorEvent(member=0, time=86_405.0, message="m0: no space left", hint="free some"),
    ]
    folder = write_run(tmp_path, [*begun, lost[0], *back, warned[0], lost[1], warned[1]])
    write(folder / "logs", "m0", b"1970-01-02T00:00:00Z first\n  and more\n1970-01-02T00:00:03Z ERROR third\n")
    write(folder / "logs", "m1", b"1970-01-02T00:00:01.500Z second\r\n")
    assert main(["logs", folder.name[:20], "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        *("m0: 1970-01-02T00:00:00Z first", "m0:   and more"),
        "m1: 1970-01-02T00:00:01.000Z WARNING lost: silent 1",
        "m1: 1970-01-02T00:00:01.500Z second",
        "m1: 1970-01-02T00:00:02.000Z WARNING is back",
        "run: 1970-01-02T00:00:02.500Z WARNING m1: found at 10.0.0.9 by its host key",
        "m0: 1970-01-02T00:00:03Z ERROR third",
        "m1: 1970-01-02T00:00:04.000Z WARNING lost: silent 4",
        "m0: 1970-01-02T00:00:05.000Z ERROR no space left (free some)",
    ]
    book = LogBook(folder / "logs")
    book.look(RunNotices().since_last(read_view(folder)))
    assert [f"{line.machine}: {line.text}" for line in book.lines] == [re.sub(r"1970\S+ ", "", line) for line in lines]
    assert [line.machine for line in book.lines if line.is_notice] == ["m1", "m1", "run", "m1", "m0"]
    assert [line.level for line in book.lines][2:] == ["warning", "info", *["warning"] * 2, "error", "warning", "error"]


def test_what_scripts_print_without_times_is_merged_from_the_beginnings_to_the_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path, [])
    for name, count in (("m0", 3000), ("m1", 1000)):
        write(folder / "logs", name, b"".join(b"line %04d\n" % number for number in range(count)))
    assert main(["logs", folder.name[:20], "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4000
    assert [sum(line.startswith("m1") for line in lines[at : at + 400]) for at in (0, 1800, 3600)] == [100, 100, 100]


def test_a_time_is_taken_in_the_zone_that_the_line_names() -> None:
    same = ("2026-01-01T09:00:00Z x", "2026-01-01T11:30:00+02:30 x", "[2026-01-01 06:30:00.000-0230] x")
    assert {time_of(text) for text in same} == {(1_767_258_000.0, "x")}
    assert time_of("0001-01-01T00:00:00 x") == (None, "0001-01-01T00:00:00 x")
    assert time_of("2026-01-01T09:00:00+99:00 x") == (None, "2026-01-01T09:00:00+99:00 x")


def test_how_bad_a_line_sounds() -> None:
    assert [level_of(text) for text in ("ERROR: x", "ValueError: y", "UserWarning: z", "step 3")] == [
        "error", "error", "warning", "info",
    ]  # fmt: skip


@settings(max_examples=50)
@given(st.text(max_size=60))
def test_any_beginning_of_a_line_is_no_error(text: str) -> None:
    time, rest = time_of(text)
    assert text.endswith(rest)
    assert time is None or time > 0


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=30), max_size=8))
def test_any_bytes_are_shown(chunks: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        book = LogBook(Path(folder))
        for chunk in chunks:
            write(Path(folder), "a", chunk)
            book.look()
        assert book.lines == () or all("\n" not in line.text for line in book.lines)
