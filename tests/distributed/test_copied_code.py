"""The copy of a light core's code that the environment which trains here imports."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from distributed.preparation import this_computer


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation's packages, and where their copy goes."""
    for name in this_computer._PACKAGES:
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    monkeypatch.setattr(this_computer, "TOP", tmp_path / "site")
    (tmp_path / "code").mkdir()
    return tmp_path / "code" / "digest"


def test_all_packages_and_the_version_are_copied(code: Path) -> None:
    this_computer._copied_code(code)
    assert {path.name for path in code.iterdir()} > set(this_computer._PACKAGES)
    assert [path.name for path in code.parent.iterdir()] == [code.name]


def test_two_commands_may_equip_this_computer_at_once(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = importlib.metadata.distribution

    def other_command_is_done(name: str) -> Any:
        code.mkdir()
        (code / "app").mkdir()
        return described(name)

    monkeypatch.setattr(importlib.metadata, "distribution", other_command_is_done)
    assert this_computer._copied_code(code) == code
    assert [path.name for path in code.parent.iterdir()] == [code.name]


def test_a_folder_that_cannot_be_written_is_an_error(code: Path) -> None:
    code.touch()  # a file is in the way
    with pytest.raises(OSError, match="digest"):
        this_computer._copied_code(code)
