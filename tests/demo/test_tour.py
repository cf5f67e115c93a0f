"""Somebody who never saw the project, in a terminal of 80x24, with nothing but the keys that the screens name."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo.tmux_terminal import Tmux
from training.records.event_log import follow_lines
from training.records.lease import LOCK_NAME
from training.records.run_files import is_live
from training.records.run_folder import RunFolder
from training.run.requests.request_book import leave_request

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]


TOUR = str(Path(__file__).with_name("tour_process.py"))


def set_up(folder: Path, *arguments: str, script: Path = ROOT / "wizard.py") -> Tmux:
    return Tmux([sys.executable, str(script), *arguments], folder)


def first_run(output: Path) -> Path:
    (path,) = output.iterdir()
    return path


@contextlib.contextmanager
def held_when_a_machine_is_lost(run: Path) -> Iterator[None]:
    """Wait until a run has lost a machine, and stop its process for a while."""
    assert any(b'"status":"lost"' in line for line in follow_lines(run / "events.jsonl", lambda: is_live(run)))
    pid = int((run / LOCK_NAME).read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(300)
def test_the_scripted_tour(tmp_path: Path) -> None:
    """Home to the dashboard; a machine is lost and comes back; and out again, while the run goes on."""
    with Tmux([sys.executable, TOUR], tmp_path) as terminal:
        terminal.until("What do you want to do?", "New set-up", "enter Open", "? Help", "^p Palette")
        terminal.press("Enter")
        terminal.until("3 picked of 3 found", "demo-pc")
        terminal.press("Enter")
        terminal.until("Can Muster log in there?", "new host key", "no key")
        terminal.press("Enter")
        terminal.until("Install a key")
        terminal.write("s3cret-words")
        assert "s3cret" not in terminal.screen
        terminal.press("Enter")
        terminal.until("1 of 2 accept the login")
        terminal.press("Down", "Enter")
        terminal.until("They match")
        terminal.press("a")
        terminal.until("2 of 2 accept the login")
        terminal.press("Enter")
        terminal.until("Are they ready to train?", "2 of 3 ready", "nothing is installed there yet")
        terminal.press("F")
        terminal.until("3 of 3 ready")
        terminal.press("Enter")
        terminal.until("How fast is the network", "3 links", "en7 to enp5s0")
        terminal.press("Enter")
        terminal.until("Which model, on which data?", "whisper-tiny-en", "3880 samples")
        terminal.press("n")
        terminal.until("How should they train together?", "recommended")
        terminal.press("Enter")
        terminal.until("Review and start", "enter Start", "recorded")
        terminal.press("Enter")
        terminal.until("1 Overview", "Healthy", "3/3 machines", "step ")
        run = first_run(tmp_path / "output")
        with held_when_a_machine_is_lost(run):  # else it might be back before it is looked at
            terminal.until("Degraded", "2/3 machines", "demo-studio lost")
            leave_request(run, "pause")
        terminal.press("5")
        terminal.until("root cause", "link is down")
        leave_request(run, "add", "demo-studio")
        terminal.press("1")
        terminal.until("Paused", "3/3 machines")
        terminal.press("d")
        terminal.until_gone("1 Overview")
        terminal.press("C-c")
        terminal.until("exit code 130")
        assert is_live(run)
    leave_request(run, "kill")
    assert all(b"s3cret" not in path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_leaving_anywhere_changes_no_file(tmp_path: Path) -> None:
    """ctrl+c in the middle; typed answers and dialogs included."""
    before = (ROOT / "config.ini").read_bytes(), sorted((ROOT / "profiles").rglob("*.ini"))
    with set_up(tmp_path, "--demo", "1") as terminal:
        terminal.until("New set-up")
        terminal.press("Enter")
        terminal.until("1 picked of 1 found")
        terminal.press("Enter")
        terminal.until("Which model, on which data?", "epochs")
        terminal.press("Down", "Down", "Down", "Down", "Enter")
        terminal.until("epochs", "esc Close")
        terminal.write("7")
        terminal.press("C-c")
        terminal.until("exit code 130")
    assert before == ((ROOT / "config.ini").read_bytes(), sorted((ROOT / "profiles").rglob("*.ini")))
    assert not (tmp_path / "output").exists()


@pytest.fixture
def copy(project_copy: Path) -> Path:
    """The project in another folder; it takes few clips."""
    config = project_copy / "config.ini"
    few = "eval_batch_size = 8\nmax_eval_samples = 8\nmax_train_samples = 96"
    config.write_text(config.read_text().replace("eval_batch_size = 80", few))
    return project_copy


@pytest.mark.timeout(400)
def test_enter_enter_trains_on_this_machine(copy: Path) -> None:
    """The shortest way really trains; only the number of epochs is typed, so that it is over soon."""
    config = (copy / "config.ini").read_bytes()
    with set_up(copy, script=copy / "wizard.py") as terminal:
        terminal.until("What do you want to do?", "New set-up")
        terminal.press("n")
        terminal.until("1 picked of", "(here)")
        terminal.press("Enter")
        terminal.until("Which model, on which data?", "epochs", "22.1")
        terminal.press("Down", "Down", "Down", "Down", "Enter")
        terminal.until("epochs", "esc Close")
        terminal.press("C-u")
        terminal.until_gone("   22.1")
        terminal.write("0.6")
        terminal.until("│   0.6 ")
        terminal.press("Enter")
        terminal.until("0.6 *")
        terminal.until("3880 samples", patience=120)
        terminal.press("n")
        terminal.until("Review and start", "enter Start", patience=180)
        terminal.press("Enter")
        terminal.until("1 Overview", "Completed", patience=240)
        terminal.press("C-c")
        terminal.until("exit code")
    run = first_run(copy / "output")
    assert (run / "model" / "config.json").is_file()
    assert RunFolder.open(run).metadata.metrics["steps"] == 4
    assert (copy / "config.ini").read_bytes() == config
