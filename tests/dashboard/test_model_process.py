"""The process that runs models for the dashboard: it stays while it is needed, and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from textual.pilot import Pilot

from app.dashboard.dialogs.model_process import ModelProcess
from app.screens.app import WizardApp
from app.wizard.state.state import Step
from profiles.errors import BadInput
from speech.report.hearing import HearingDialog
from tests.dashboard.test_next_steps import CLIP, MODEL
from tests.lab.processes import is_dead
from tests.screens.pilot import fixed_clock, run, until_text
from tests.screens.states import at
from tests.waiting import until

ANSWERING = """
import json, os, sys
for line in sys.stdin:
    print("loading", *json.loads(line), file=sys.stderr)
    heard = [{"text": f"heard by {os.getpid()}", "normalised": f"heard by {os.getpid()}"}]
    print(json.dumps({"transcripts": heard, "base": {"transcripts": heard}, "exit_code": 0}), flush=True)
"""
BUSY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("pids", child.pid, flush=True)
child.wait()
"""


def process_of(script: str) -> ModelProcess:
    return ModelProcess([sys.executable, "-c", script])


def test_one_process_answers_all() -> None:
    models = process_of(ANSWERING)
    first = models.ask("transcribe", "a")
    assert models.ask("transcribe", "b") == first and models.stage == "loading transcribe b"
    models.close()


def test_one_that_has_ended_says_its_last_words_and_is_started_again() -> None:
    models = process_of("import sys; input(); sys.exit('no memory')")
    for _ in range(2):
        with pytest.raises(BadInput, match="the model cannot be asked: no memory"):
            models.ask("transcribe", "a")
    models.close()


def test_files_go_with_it() -> None:
    models = process_of(ANSWERING)
    clip = models.file("clip.mp3", b"a clip")
    assert clip.read_bytes() == b"a clip"
    models.close()
    assert not clip.parent.exists()
    with pytest.raises(BadInput):
        models.ask("transcribe", str(clip))


def leave(script: str, shown: str, *keys: str) -> list[bool]:
    """Ask a model, press keys, and end the application; return whether the model's process, and each of its children,
    had ended before that."""
    models = process_of(script)
    processes: list[int] = []
    states: list[bool] = []

    async def drive(pilot: Pilot[Any]) -> None:
        pilot.app.push_screen(HearingDialog([], MODEL, "base", [CLIP], lambda: None, lambda: models))
        await until_text(pilot, "What next?")
        await pilot.press("enter")
        await until_text(pilot, shown)
        assert models._process is not None
        leader = psutil.Process(models._process.pid)
        processes.extend(process.pid for process in (leader, *leader.children()))
        await pilot.press(*keys)
        states.extend(map(is_dead, processes))

    run(WizardApp(cast(Any, at(Step.LINKS)), clock=fixed_clock), drive, (120, 32))
    until(lambda: all(map(is_dead, processes)))
    return states


@pytest.mark.slow
def test_leaving_before_the_answer_ends_the_process_and_its_children() -> None:
    leader, _ = leave(BUSY, "pids", "escape")
    assert leader


@pytest.mark.slow
def test_the_end_of_the_application_ends_them_too() -> None:
    assert leave(BUSY, "pids") == [False, False]


@pytest.mark.slow
def test_after_an_answer_the_models_stay_loaded_until_the_dialog_is_left() -> None:
    assert leave(ANSWERING, "heard", "escape") == [False]
    assert leave(ANSWERING, "heard", "escape", "escape") == [True]


def test_its_files_are_in_its_temporary_folder(tmp_path: Path) -> None:
    models = process_of("import json, tempfile; input(); print(json.dumps({'at': tempfile.mkdtemp(), 'exit_code': 0}))")
    folder = Path(models.ask("transcribe")["at"])
    models.close()
    assert not folder.exists()
