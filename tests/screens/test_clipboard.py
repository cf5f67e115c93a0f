"""What is copied is said to be copied only where a program of the desktop took it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from app.shell.base_app import MusterApp
from tests.screens.pilot import run, until


@pytest.mark.parametrize(("code", "said"), [(0, "Copied"), (1, "Sent to the terminal's clipboard")])
@pytest.mark.parametrize(("program", "desktop"), [("xclip", "DISPLAY"), ("wl-copy", "WAYLAND_DISPLAY")])
def test_copied_is_what_a_program_took(
    program: str, desktop: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(desktop, "there")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / program).write_text(f"#!/bin/sh\ncat > '{tmp_path}/taken'\nexit {code}\n")
    (tmp_path / program).chmod(0o755)
    app = MusterApp()

    async def drive(pilot: Pilot[Any]) -> None:
        app.copy("two words")
        await until(pilot, lambda: [one.title for one in app._notifications] == [said])

    run(app, drive, (80, 24))
    assert (tmp_path / "taken").read_text() == "two words"
