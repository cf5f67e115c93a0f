"""Where the time of a start goes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from training.records.events import TimingEvent
from training.run.processes import PhaseTimer, process_age


def test_parts_follow_each_other_without_a_gap() -> None:
    parts: list[TimingEvent] = []
    phases = PhaseTimer(parts.append, whole_process=False)
    phases.end("one")
    phases.end("two")
    first, second = parts
    assert [first.part, second.part] == ["one", "two"]
    assert second.time - second.seconds == pytest.approx(first.time, abs=1e-6)


def test_the_cpu_seconds_of_a_part_are_its_own() -> None:
    parts: list[TimingEvent] = []
    phases = PhaseTimer(parts.append, whole_process=False)
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        continue
    phases.end("work")
    phases.end("nothing")
    assert parts[0].cpu is not None and parts[0].cpu >= 0.05
    assert parts[1].cpu is not None and parts[1].cpu < 0.05


@pytest.mark.slow
def test_a_process_knows_its_age() -> None:
    began = time.monotonic()
    code = "from training.run.processes import process_age; print(process_age())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.0 < float(said.stdout) <= time.monotonic() - began + 0.02  # it is counted in ticks of 10 ms
    assert process_age() > 0.0
