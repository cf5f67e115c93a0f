"""The dashboard in a real terminal: it comes and goes, and the run does not notice."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import live, new_folder, started, steps

from tests.lab.host import REPOSITORY
from tests.screens.terminal import Terminal
from training.records.run_files import is_live
from training.records.run_folder import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    now = time.time() - 31
    with live(new_folder(tmp_path), [*started(at=now), *steps(1, 30, at=now)]) as run:
        yield run


def attach(folder: RunFolder, *options: str) -> Terminal:
    return Terminal(sys.executable, str(REPOSITORY / "cli_typer.py"), "attach", str(folder.path), *options)


def test_a_screen_that_is_killed_or_loses_its_terminal_leaves_the_run_alone(folder: RunFolder) -> None:
    with attach(folder) as first, attach(folder) as second:
        first.until("step 30/100")
        second.until("step 30/100")
        first.process.kill()
        second.hang_up()
        second.process.wait(60)
    assert is_live(folder.path)
    for event in steps(31, 40, at=time.time() - 40):
        folder.append(event)
    with attach(folder) as third:
        third.until("step 40/100")
        third.press("\x03")
        assert third.end() == 130
        assert "the run goes on; watch: " in third.words and "\nstop it: " in third.words
    assert list((folder.path / "requests").glob("*")) == [] if (folder.path / "requests").exists() else True


def test_plain_and_pipes_get_no_screen(folder: RunFolder) -> None:
    folder.finish("completed", {})
    folder.close()
    with attach(folder, "--plain") as terminal:
        terminal.end()
        assert b"\x1b[?1049h" not in terminal.written
