"""Processes of a run wait for each other asleep, unless a person has said otherwise; what they say is read whole."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from training.run.processes import PROCESS_DEFAULTS, SubprocessWorker, environment


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROCESS_DEFAULTS:
        monkeypatch.delenv(name, raising=False)


def test_threads_that_wait_sleep() -> None:
    assert environment(2).items() >= {**PROCESS_DEFAULTS, "OMP_NUM_THREADS": "2"}.items()


@pytest.mark.parametrize("name", PROCESS_DEFAULTS)
def test_a_persons_own_setting_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "mine")
    assert environment(0).items() >= {**PROCESS_DEFAULTS, name: "mine"}.items()


def test_what_a_process_said_can_be_read_after_somebody_waited_for_its_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        worker = SubprocessWorker("platform", ["terse"], 1, log)
    lines = worker.lines()
    assert worker.exit_code() == 0
    assert [line.decode().strip() for line in lines] == [platform.platform(terse=True)]
