from __future__ import annotations

from pathlib import Path

import pytest

from profiles.declarations import forms
from profiles.ini import parse_ini
from profiles.options import options
from profiles.reference import PAGE, ini_block, main, markdown
from profiles.resolve import load_profile


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), "run: .venv/bin/python -m profiles.reference"


def test_the_page_has_every_option() -> None:
    rows = [line.split("`")[1] for line in markdown().splitlines() if line.startswith("| `")]
    assert [name for name in rows if name not in forms("codec")] == [spec.name for spec in options()]
    assert set(forms("codec")) < set(rows)


def test_ini_block_without_its_comment_signs_is_a_valid_section(tmp_path: Path) -> None:
    lines = ini_block(options()).splitlines()
    uncommented = "\n".join(line[1:] if line.startswith("#") and line[1:2].isalpha() else line for line in lines)
    config = tmp_path / "config.ini"
    config.write_text(f"[DEFAULT]\n{uncommented}\n[profile:p]\n")
    assert len(parse_ini(config.read_text(), config).sections["DEFAULT"].entries) == len(options())
    resolved = load_profile("p", {}, config, complete=False)
    assert {origin.section for origin in resolved.origins.values()} == {"DEFAULT"}


def test_printing_the_ini_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ini"]) == 0
    assert capsys.readouterr().out.startswith("[DEFAULT]\n# kind of job")
