"""What others use of a machine is told apart from what the run itself uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest

from training.hardware.sensors import OtherLoad, RunProcesses
from training.records.events import MachineEvent


class Times(SimpleNamespace):
    """Seconds of all processors, as the system counts them."""

    def __iter__(self) -> Iterator[float]:
        return iter(vars(self).values())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times(user=100.0, system=0.0, idle=900.0, iowait=0.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: Times(**vars(times)))
    return times


def test_what_the_run_uses_is_not_the_load_of_others(clock: Times) -> None:
    own = {1: 5.0}
    load = OtherLoad(lambda: dict(own))
    clock.user, clock.idle = 100.0 + 16.0, 900.0 + 4.0
    own |= {1: 9.0, 2: 4.0}  # a second process of the run came meanwhile
    assert load.share() == pytest.approx((16.0 - 8.0) / 20.0)
    assert load.share() is None  # no time has passed


def elsewhere(run_id: str) -> dict[int, float]:
    """Look as a process that has nothing to do with those of this test."""
    return RunProcesses(run_id, inside=False).seconds()


def test_processes_of_the_run_are_known_by_its_id_or_its_parent() -> None:
    sleep = "import time; print(flush=True); time.sleep(60)"
    named = [sys.executable, "-c", sleep, "--plan", "output/20261121-013005-ab12-demo/plan.json"]
    with subprocess.Popen(named, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert child.pid in elsewhere("20261121-013005-ab12")
            assert child.pid not in elsewhere("20261121-013005-ffff")
            assert os.getpid() in RunProcesses("20261121-013005-ffff").seconds()
        finally:
            child.kill()


def test_what_the_runs_own_processes_start_is_its_own() -> None:
    """Such as readers of data that are spawned, whose command line names no run."""
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    named = [sys.executable, "-c", start, "20261121-013005-ab12"]
    with subprocess.Popen(named, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        (inner,) = psutil.Process(child.pid).children()
        assert {child.pid, inner.pid} <= elsewhere("20261121-013005-ab12").keys()
        child.stdin.close()


class Numbered:
    """A process whose number is lower than that of its parent: numbers begin anew."""

    parents: ClassVar[dict[int, int]] = {1: 0, 40: 310, 310: 32_760, 400: 1, 32_760: 1}

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def ppid(self) -> int:
        return self.parents[self.pid]

    def cmdline(self) -> list[str]:
        return ["worker", "20261121-013005-ab12"] if self.pid == 32_760 else ["python"]

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=1.0, system=0.5)


def test_a_child_is_known_whatever_number_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "pids", lambda: sorted(Numbered.parents))
    monkeypatch.setattr(psutil, "Process", Numbered)
    assert elsewhere("20261121-013005-ab12") == {40: 1.5, 310: 1.5, 32_760: 1.5}


@pytest.mark.parametrize(
    ("others", "busy", "told"), [(50, 100, True), (50, 60, False), (10, 100, False), (None, 100, False)]
)
def test_others_slow_a_run_where_no_processor_is_left(others: float | None, busy: float, told: bool) -> None:
    load = MachineEvent(cpu_percent=busy, others_percent=others, memory_used=0, memory_total=1)
    assert load.slowed_by_others is told
