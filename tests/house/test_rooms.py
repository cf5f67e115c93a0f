"""Speech is a room that the core finds by its entry points, as it finds a stranger's package."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from app import task_results
from app.cli import commands
from app.cli.commands import COMMANDS
from app.task_results import TaskResults, results_of
from profiles import installation
from profiles.declarations import trait_of
from profiles.errors import BadInput
from training.tasks.registry import inputs_of

ROOT = Path(__file__).parents[2]
TEXT_TASK = """
import sys
sys.path.insert(0, sys.argv[1])
from app.cli.commands import command_tree
from distributed import launcher, supervisor
from profiles.files.resolve import load_profile
from app.task_results import results_of
from training.tasks.registry import size_for, task_from_profile
from training.workers.data_findings import check_data, findings
profile = load_profile("nanogpt").profile
check_data(profile), findings(profile), size_for(profile), results_of(profile.model.task), task_from_profile(profile)
print(sorted(name for name in sys.modules if name.split(".")[0] == "speech"))
"""
DECLARATIONS = {"speech", "speech.task", "speech.commands", "speech.commands.entries"}


def test_a_checkout_finds_speech_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "entry_points", lambda group: ())
    named = {point.name for point in installation.plugins.__wrapped__("muster.tasks")}
    assert named == {"whisper"}
    assert trait_of("whisper") == "speech" and "transcribe" in COMMANDS


def test_a_broken_package_is_named_and_takes_no_command_of_others_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = "muster.commands"
    broken, working = EntryPoint("listen", "no_such_package:X", group), installation.plugins(group)
    monkeypatch.setattr(commands, "plugins", lambda group: (broken, *working))
    assert "transcribe" in commands.plugin_commands()
    assert "package no_such_package: 'listen' cannot be used" in capsys.readouterr().err
    monkeypatch.setattr(task_results, "plugins", lambda group: (broken,))
    with pytest.raises(BadInput, match="package no_such_package"):
        results_of("listen")


def test_a_task_without_results_of_its_own_has_none() -> None:
    assert type(results_of("causal_lm")) is TaskResults
    assert not inputs_of("no-such-task").reads_dataset


@pytest.mark.slow
def test_a_language_model_loads_no_speech_but_its_declarations(tmp_path: Path) -> None:
    """A copy of the preloaded Python, in which Muster is loaded anew: its folder has none."""
    code = "from multiprocessing.util import os" + TEXT_TASK
    done = subprocess.run([sys.executable, "-c", code, ROOT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(eval(done.stdout)) <= DECLARATIONS


@pytest.mark.slow
def test_a_strangers_package_is_found_like_speech(tmp_path: Path) -> None:
    package = tmp_path / "their_task"
    metadata = tmp_path / "their_task-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-task\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[muster.tasks]\ntheirs = their_task\n[muster.commands]\ntheirs = their_task:COMMANDS\n"
    )
    (package / "__init__.py").write_text(
        "from app.cli.command_entry import CommandEntry\n"
        "from training.tasks.registry import register\n"
        "COMMANDS = {'listen': CommandEntry('their_task', 'Listen.', 'model')}\n"
        "register('theirs', 'a task of a stranger', lambda profile: None)\n"
    )
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from app.cli.commands import COMMANDS\n"
        "from profiles.declarations import owners\n"
        "print('theirs' in owners('model'), COMMANDS['listen'].about)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True Listen.\n", "")
