"""Processes of a run wait for each other asleep, unless a person has said otherwise."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import pytest

from training.processes import WAITING, SpawnedWorker, environment


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


def _tell(connection: Connection[Any, Any]) -> None:
    connection.send_bytes(" ".join(os.environ.get(name, "") for name in WAITING).encode())


def test_a_spawned_worker_has_them_and_this_process_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    worker = SpawnedWorker(_tell, ())
    assert next(worker.lines()) == b"ACTIVE 0"
    assert worker.exit_code() == 0
    assert "GOMP_SPINCOUNT" not in os.environ
