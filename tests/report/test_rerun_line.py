"""The command that starts a run again works in any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.report import rerun_line
from training.records.plan import RunMetadata

STARTED = RunMetadata(
    run_id="r",
    start_time="2026-01-01T00:00:00Z",
    profile="demo",
    command=["cli_typer.py", "distributed-train", "demo", "--hosts", "my hosts.json"],
    folder="/home/ada/muster",
)
LINE = "python3 cli_typer.py train demo --hosts 'my hosts.json'"


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        (STARTED, f"cd /home/ada/muster && {LINE}"),
        (STARTED.model_copy(update={"folder": ""}), LINE),
        (
            STARTED.model_copy(update={"command": ["muster", "distributed-train", "demo"], "folder": "/a b"}),
            "cd '/a b' && muster train demo",
        ),
        (STARTED.model_copy(update={"command": []}), ""),
    ],
)
def test_it_enters_the_folder_of_its_relative_paths(metadata: RunMetadata, line: str) -> None:
    assert rerun_line(metadata) == line


def test_it_enters_no_folder_in_which_it_is_typed() -> None:
    assert rerun_line(STARTED, Path("/home/ada/muster")) == LINE
