"""What a command says first, and how often it says how far an installation is."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.terminal import PacedLines
from app.cli.train.request import TrainRequest
from distributed.measuring.machine_figures import MeasuringProgress
from distributed.preparation.wheels import InstallProgress


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (TrainRequest("demo", {"hosts": "a,b"}), "reading profile demo, then connecting to a, b"),
        (TrainRequest(resume="3f2a", overrides={"hosts": "a"}), "reading run 3f2a, then connecting to a"),
        (TrainRequest("demo", {"hosts": "a"}, as_json=True), ""),
        (TrainRequest("demo"), ""),
    ],
)
def test_a_start_on_machines_says_at_once_what_it_does(request_: TrainRequest, line: str) -> None:
    assert request_.first_line == line


def test_a_hosts_file_is_no_machine(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text("{}")
    assert TrainRequest("demo", {"hosts": str(file)}).first_line.endswith(f"connecting to the machines of {file}")


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
