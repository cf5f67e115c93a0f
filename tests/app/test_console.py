from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from app.console import command_about, command_line, say_error, show, show_json, visible
from profiles.installation import way_to_add
from profiles.quantities import bytes_text, duration_text


@given(st.text())
def test_visible_text_is_one_printable_line(text: str) -> None:
    assert visible(text).replace("\u200c", "").replace("\u200d", "").isprintable()


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "seen"), [("می\u200cشود", "می\u200cشود"), ("ஸ்ரீ क\u200dष", "ஸ்ரீ क\u200dष"), ("10\u202f%\u3000今", "10 % 今")]
)
def test_texts_of_other_scripts_can_be_read(text: str, seen: str) -> None:
    assert visible(text) == seen


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (2.5e9, "2.5 GB")]
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (float("nan"), "-"), (float("inf"), "-"), (0, "0:00"), (83.4, "1:23"), (3723, "1:02:03")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"a": float("nan"), "b": "ä\x1b"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": None, "b": "ä\x1b"}
    assert "\x1b" not in out


def test_an_error_is_two_lines_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    say_error("bad\nthing\x1b[0m", "do\nthis")
    assert capsys.readouterr().err == "error: bad thing\\x1b[0m\nhint: do this\n"


def test_commands_to_type_are_quoted() -> None:
    assert command_line("transcribe", "a b.wav").endswith("cli_typer.py transcribe 'a b.wav'")


def test_a_command_about_a_run_finds_it_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "20261121-110314-77d7-demo"
    monkeypatch.chdir(tmp_path)
    assert command_about(tmp_path / "output" / name, "stop", "--kill").endswith("stop --kill 20261121-110314-77d7")
    assert way_to_add(Path("output") / name, "my mac").endswith("runs ask 20261121-110314-77d7 add 'my mac'")
    assert command_about(Path("else where") / name, "attach").endswith("77d7 --output 'else where'")


def test_a_pipe_gets_a_row_a_line_without_blanks_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("run", "result", box=None, pad_edge=False)
    table.add_row("a", "x" * 300)
    table.add_row("b", "")
    show(table)
    assert capsys.readouterr().out.splitlines() == ["run  result", f"a    {'x' * 300}", "b"]
