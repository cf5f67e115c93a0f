"""Commands for the way in which Muster was installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from profiles.installation import package_line


def test_a_package_is_added_by_the_tool_that_made_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package_line("some-package").startswith(f"{sys.executable} -m pip install -c ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as uv makes it, and uv tool
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/uv")
    assert package_line("some-package").startswith(f"uv pip install --python {sys.executable} -c ")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "envs" / "a"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert package_line("some-package").startswith(f"{tmp_path}/envs/.uv/bin/uv pip install --python ")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "pipx_metadata.json").touch()
    assert package_line("some-package") == "pipx inject muster-train some-package"
