"""Commands for the way in which Muster was installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from profiles.installation import package_line, shown_path
from tests.preloaded.python import python_itself


def test_a_package_is_added_by_the_tool_that_made_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package_line("some-package").startswith(f"{sys.executable} -m pip install -c ")
    monkeypatch.setattr("profiles.installation._has_pip", lambda: False)  # as uv makes it, and uv tool
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/uv")
    assert package_line("some-package").startswith(f"uv pip install --python {sys.executable} -c ")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "envs" / "a"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert package_line("some-package").startswith(f"{tmp_path}/envs/.uv/bin/uv pip install --python ")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "pipx_metadata.json").touch()
    assert package_line("some-package") == "pipx inject muster-train some-package"


@pytest.mark.slow
def test_setuptools_can_be_loaded_after_a_package_was_missing() -> None:
    program = "from profiles.installation import package_line; package_line('x'); import setuptools"
    subprocess.run([python_itself(), "-c", program], check=True)


def test_a_path_is_shown_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here" / "a.ini") == "a.ini"
    assert shown_path(tmp_path / "b" / "c.ini") == "~/b/c.ini"
    assert shown_path("/dev/null") == "/dev/null"
