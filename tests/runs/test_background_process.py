"""A background process that cannot begin: why is in its log, and it does not begin later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from profiles.errors import RunFailed
from training.run.processes import BackgroundProcess


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def test_the_log_keeps_why_a_supervisor_ended(run_dir: Path) -> None:
    with pytest.raises(RunFailed, match="did not start") as caught:
        BackgroundProcess("distributed.supervisor").start(run_dir)
    log = run_dir / "logs" / "supervisor.log"
    assert caught.value.hint == f"see {log}"
    assert "metadata.json" in log.read_text()


def test_one_that_is_given_up_is_ended(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    standing_by = BackgroundProcess("distributed.supervisor", patience=0.1)
    with pytest.raises(RunFailed, match="did not start"):
        standing_by.start(run_dir)
    assert standing_by._process.wait(60) < 0
