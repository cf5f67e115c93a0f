"""Processes of a run wait for each other asleep, unless a person has said otherwise; what they say is read whole."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from training.run.processes import WAITING, SubprocessWorker, environment


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)


def test_threads_that_wait_sleep() -> None:
    assert environment(2).items() >= {**WAITING, "OMP_NUM_THREADS": "2"}.items()


def test_a_persons_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment(0)["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment(0)["GOMP_SPINCOUNT"] == "0"


def test_what_a_process_said_can_be_read_after_somebody_waited_for_its_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        worker = SubprocessWorker("platform", ["terse"], 1, log)
    lines = worker.lines()
    assert worker.exit_code() == 0
    assert [line.decode().strip() for line in lines] == [platform.platform(terse=True)]
