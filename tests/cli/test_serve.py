"""``serve``: one process that answers command lines and keeps the models that they loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.model import serve
from profiles.installation import TOP

SCRIPT = TOP / "cli_typer.py"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process keeps models."""
    monkeypatch.setattr(serve, "_serving", type(serve._serving)())
    serve._serving.set()
    serve._kept.cache_clear()


def loads(names: str) -> list[str]:
    """Return the names that were loaded when all were asked for."""
    done: list[str] = []

    def load(name: str) -> str:
        done.append(name)
        return name

    assert [serve.loaded(load, name) for name in names] == list(names)
    return done


def test_a_command_on_its_own_loads_what_it_is_asked_for() -> None:
    assert loads("aab") == ["a", "a", "b"]


@pytest.mark.usefixtures("kept")
def test_the_models_before_and_after_training_are_loaded_once() -> None:
    assert loads("babab") == ["b", "a"]
    assert loads("xyzx") == ["x", "y", "z", "x"]  # no third one


def test_each_line_is_answered_by_one_and_the_end_of_input_ends_it(tmp_path: Path) -> None:
    lines = [json.dumps(words) for words in (["transcribe", "nothing", "x.wav"], ["profiles", "list"])]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        answers = []
        for line in lines:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answers.append(json.loads(process.stdout.readline()))
    assert "nothing" in answers[0]["error"]["message"] and answers[0]["exit_code"] == 2
    assert answers[1]["exit_code"] == 0
    assert process.returncode == 0


def test_a_line_that_is_no_command_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "serve"],
        input='"transcribe"\n',
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "not a command line" in ended.stderr and ended.returncode == 2
