from __future__ import annotations

from pathlib import Path

from docs.make_options import PAGE, markdown
from profiles.declarations import forms
from profiles.files.resolve import load_profile
from profiles.options import options


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), "run: .venv/bin/python docs/make_options.py"


def test_the_page_has_every_option() -> None:
    rows = [line.split("`")[1] for line in markdown().splitlines() if line.startswith("| `")]
    assert [name for name in rows if name not in forms("codec")] == [spec.name for spec in options()]
    assert set(forms("codec")) < set(rows)


def test_every_default_can_stand_in_a_file(tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text("\n".join(["[DEFAULT]", *(f"{one.name} = {one.default}" for one in options()), "[profile:p]\n"]))
    resolved = load_profile("p", {}, config, complete=False)
    assert {origin.section for origin in resolved.origins.values()} == {"DEFAULT"}
