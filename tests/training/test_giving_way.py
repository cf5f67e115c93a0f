"""A member gives way to the owner of its machine: by fakes of its load, of the desktop and of time; once beside a
program that really computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import group
import pytest
import torch
from group import Serve
from toy_task import ToyTask, toy_plan

from tests.waiting import PATIENCE
from training.hardware import giving_way
from training.hardware.giving_way import CALM, COOL, HOT, IN_USE, GivingWay
from training.hardware.idle_time import IdleTime
from training.loop.uneven_trainer import BalancedTrainer
from training.records.events import Event, MachineEvent, StepEvent, WarningEvent, from_line

IDLE = MachineEvent(cpu_percent=50, memory_used=1, memory_total=2, on_mains=True, celsius=60.0, others_percent=3.0)


class Member:
    """A member that gives way, with the time and the keyboard of this test."""

    def __init__(self) -> None:
        self.now, self.untouched = 0.0, 1000.0
        self.warnings: list[str] = []
        self.way = GivingWay("b", self._take, lambda: self.untouched, lambda: self.now)

    def _take(self, event: Event) -> None:
        assert isinstance(event, WarningEvent)
        self.warnings.append(event.message)

    def note(self, **load: object) -> str:
        self.now += 5.0
        return self.way.note(IDLE.model_copy(update=load)).gives_way or ""


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ({"on_mains": False}, "it runs on battery"),
        ({"celsius": HOT}, "it is hot (85 °C)"),
        ({"throttled": True, "celsius": None}, "it is hot"),
        ({"others_percent": 45.0}, "other programs use 45 % of its processors"),
    ],
)
def test_it_gives_way_and_says_why_once_and_when_that_is_over(load: dict[str, object], reason: str) -> None:
    member = Member()
    assert member.note() == ""
    assert [member.note(**load) for _ in range(3)] == [reason] * 3
    while member.note():
        assert member.now < 200
    assert member.now == pytest.approx(20.0 + CALM)
    assert member.warnings == [f"b gives way: {reason}", "b no longer gives way"]


def test_it_gives_way_while_somebody_types() -> None:
    member = Member()
    member.untouched = IN_USE - 1
    assert member.note() == "somebody uses it"
    member.untouched = IN_USE + 1
    assert member.note() == "somebody uses it"


def test_what_cannot_be_read_is_no_reason() -> None:
    way = GivingWay("b", lambda event: None, lambda: None)
    assert way.note(MachineEvent(cpu_percent=100, memory_used=1, memory_total=2)).gives_way is None


def test_a_machine_that_cools_a_little_is_still_hot() -> None:
    member = Member()
    member.note(celsius=HOT + 1)
    for _ in range(30):
        assert member.note(celsius=COOL)
    assert len(member.warnings) == 1


def test_it_rests_three_times_as_long_as_it_computed() -> None:
    member = Member()
    member.way.rest(0.02, lambda: False)
    assert member.way.rested is None
    member.note(on_mains=False)
    member.way.rest(0.02, lambda: False)
    assert (member.way.rested or 0.0) >= 0.06


def test_a_rest_ends_when_its_reason_does() -> None:
    member = Member()
    member.note(on_mains=False)
    rests = threading.Thread(target=member.way.rest, args=(1e6, lambda: False))
    rests.start()
    member.now += CALM
    assert member.note() == ""
    rests.join(giving_way.MOST_REST / 2)
    assert not rests.is_alive()


def test_a_stop_does_not_wait_for_a_rest() -> None:
    member = Member()
    member.note(on_mains=False)
    member.way.rest(1e6, lambda: True)
    assert (member.way.rested or 0.0) < giving_way.MOST_REST / 2


@pytest.mark.parametrize(
    ("system", "output", "seconds"),
    [
        ("darwin", '  |   "HIDIdleTime" = 2500000000\n', 2.5),
        ("linux", "(uint64 1500,)\n", 1.5),
        ("linux", None, None),
        ("win32", "", None),
    ],
)
def test_the_desktop_tells_since_when_nobody_has_typed(system: str, output: str | None, seconds: float | None) -> None:
    asked: list[Sequence[str]] = []
    idle = IdleTime(SimpleNamespace(users=list), lambda command: asked.append(command) or output, system)
    assert [idle.seconds(), idle.seconds()] == [seconds] * 2
    assert len(asked) == {None: system == "linux"}.get(seconds, 2)  # a desktop that does not tell is asked once


def test_a_terminal_tells_since_when_nobody_has_typed() -> None:
    users = [SimpleNamespace(terminal=name) for name in ("null", "no-such-terminal", None, ":0")]
    idle = IdleTime(SimpleNamespace(users=lambda: users), system="win32").seconds()
    assert idle == pytest.approx(max(0.0, time.time() - Path("/dev/null").stat().st_atime), abs=60)


def test_a_clock_that_was_set_back_makes_nobody_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    users = [SimpleNamespace(terminal="null")]
    assert IdleTime(SimpleNamespace(users=lambda: users), system="win32").seconds() is None


@pytest.mark.slow
def test_low_priority_is_that_of_what_is_started_from_then_on() -> None:
    code = (
        "import os, subprocess, sys; from training.hardware.giving_way import lower_priority; before = os.nice(0);"
        "lower_priority(); child = subprocess.check_output([sys.executable, '-c', 'import os; print(os.nice(0))']);"
        "print(int(child) - before, os.nice(0) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["10", "10"], [str(19 - _niceness())] * 2)


def _niceness() -> int:
    return int(subprocess.check_output([sys.executable, "-c", "import os; print(os.nice(0))"]))


@pytest.mark.slow
def test_others_take_over_samples_of_a_member_that_gives_way(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Working(ToyTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            time.sleep(0.005 * len(batch["x"]))
            return super().loss(model, batch)

    class Polite(BalancedTrainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if self.rank == 1:
                self.giving_way.note(IDLE.model_copy(update={"on_mains": False}))

    monkeypatch.setattr(group, "trainer_class", lambda plan: Polite)
    plan = toy_plan(2, training={"max_steps": 60, "batch_size": 8}, run={"balance": "on"})
    members = group.run_group(plan, serve(plan), lambda rank: Working(), tmp_path)
    assert [member.error for member in members.values()] == [None] * 2
    first, second = ([e for e in members[rank].events if isinstance(e, StepEvent)] for rank in (0, 1))
    assert all(a.samples + b.samples == 16 for a, b in zip(first, second, strict=True))
    assert second[-1].samples < 8 < first[-1].samples
    assert all((event.gave_way or 0.0) >= 0.01 for event in second) and not any(event.gave_way for event in first)
    assert "worker-1 gives way: it runs on battery" in {
        event.message for event in members[1].events if isinstance(event, WarningEvent)
    }


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from toy_task import ToyTask, toy_plan
from training.hardware import machine_load
from training.records.event_log import EventSink
from training.run.orders import Control
from training.workers.worker import Rendezvous, run_worker
machine_load.INTERVAL, folder = 0.2, Path(sys.argv[1])
plan, emit = toy_plan(training={"max_steps": 10**6}, run={"be_polite": True}), EventSink(sys.stdout, 0)
run_worker(plan, 0, ToyTask(), lambda: Rendezvous(""), folder, folder / "secrets", emit, Control())
"""


@contextmanager
def busy_processors() -> Iterator[None]:
    """Programs that do not belong to a run, nor are children of this process, use a quarter of the processors."""
    loops = (os.cpu_count() or 1) // 4 + 1
    shell = f"for _ in $(seq {loops}); do {sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!; done"
    pids = [int(pid) for pid in subprocess.check_output(["sh", "-c", shell], text=True).split()]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_rests_beside_a_program_that_computes(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    events: list[Event] = []
    command = [sys.executable, "-c", WORKER, str(tmp_path), str(here)]
    with ExitStack() as stack, subprocess.Popen(command, stdout=subprocess.PIPE, cwd=here.parents[1]) as worker:
        assert worker.stdout is not None
        watchdog = threading.Timer(3 * PATIENCE, worker.kill)
        watchdog.start()
        for line in worker.stdout:
            events.append(from_line(line))
            if isinstance(events[-1], StepEvent) and events[-1].step == 1:
                stack.enter_context(busy_processors())
            if isinstance(events[-1], StepEvent) and events[-1].gave_way:
                break
        watchdog.cancel()
        worker.kill()
    told = [event.message for event in events if isinstance(event, WarningEvent)]
    assert any(line.startswith("worker-0 gives way: ") for line in told)
    assert any(isinstance(event, MachineEvent) and event.gives_way for event in events)
    step = events[-1]
    assert isinstance(step, StepEvent) and step.compute > (step.gave_way or 0.0) > 0
