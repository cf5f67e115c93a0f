"""What a command says first, and how often it says how far an installation is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from app.cli.terminal import PacedLines
from app.cli.train.first_line import first_line
from distributed.measuring.machine_figures import MeasuringProgress
from distributed.preparation.wheels import InstallProgress
from tests.distributed.muster_runs import REPOSITORY
from tests.preloaded.python import python_itself


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train demo --hosts a,b", "reading profile demo, then connecting to a, b"),
        ("distributed-train --steps 3 demo --hosts=a", "reading profile demo, then connecting to a"),
        ("train --resume 3f2a --hosts a", "reading run 3f2a, then connecting to a"),
        ("train --task causal-lm --hosts a", "reading the job, then connecting to a"),
        ("train demo --hosts a --json", ""),
        ("train demo", ""),
        ("runs attach demo --hosts a", ""),
        ("train --help", ""),
    ],
)
def test_a_start_on_machines_says_at_once_what_it_does(words: str, line: str) -> None:
    assert first_line(words.split()) == line


def test_at_a_terminal_a_start_here_does_so_too() -> None:
    assert first_line(["train", "demo\x1b[2J"], is_terminal=True) == "reading profile demo?[2J"
    assert first_line([], is_terminal=True) == ""


def test_a_hosts_file_is_no_machine(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text("{}")
    assert first_line(["train", "demo", "--hosts", str(file)]).endswith(f"connecting to the machines of {file}")


@pytest.mark.slow
@pytest.mark.parametrize("entry", [["cli_typer.py"], ["-m", "muster"]])
def test_it_comes_before_anything_large_is_imported(entry: list[str]) -> None:
    """The line of a start stands among the imports that Python writes: before that of pydantic, rich and typer."""
    command = [python_itself(), "-X", "importtime", *entry, "train", "no-such", "--hosts", "a"]
    written = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120).stderr
    before, _, after = written.partition("reading profile no-such, then connecting to a\n")
    large = r"\| +(pydantic|rich|typer|training)\b"
    assert not re.search(large, before) and re.search(large, after)


def test_packages_are_counted_now_and_then() -> None:
    said, now = list[str](), [0.0]
    lines = PacedLines(said.append, lambda: now[0])
    for number in range(1, 67):
        now[0] += 0.25
        lines(InstallProgress(f"2/3 collecting packages: {number} of 66 (six)", 0.1, "a"))
    assert [line.partition(" (")[0] for line in said] == [
        "a: 2/3 collecting packages: 1 of 66", "a: 2/3 collecting packages: 41 of 66",
    ]  # fmt: skip
    lines(InstallProgress("3/3 installing 66 packages", 0.9, "a"))
    lines("a: no space left")
    assert said[2:] == ["a: 3/3 installing 66 packages", "a: no space left"]


def test_this_computer_is_called_so() -> None:
    progress = MeasuringProgress("localhost", "receiving code", 2.0)
    assert progress == "this computer: receiving code, about 0:02 left" and progress.machine == "localhost"
