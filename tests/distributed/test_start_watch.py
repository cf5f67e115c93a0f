from __future__ import annotations

from distributed.run.run_machines import StartWatch
from training.events import MemberEvent, ProgressEvent, RunEvent


def test_every_missing_machine_and_its_reason() -> None:
    watch = StartWatch(["a", "b", "c", "d"])
    for rank in (0, 1, 2):
        watch(MemberEvent(member=rank, status="started"))
    watch(ProgressEvent(member=1, phase="features", done=3, total=10))
    watch(ProgressEvent(member=2, phase="features", done=10, total=10))
    watch(MemberEvent(member=0, status="joined"))
    b, c, d = watch.missing()
    assert b == "waiting for b: it is preparing (features: 3 of 10)"
    assert c.startswith("waiting for c: its worker runs and has not reached the coordinator")
    assert d == "waiting for d: its worker has not started yet"


def test_nobody_is_missing_once_the_run_has_begun() -> None:
    watch = StartWatch(["a"])
    assert not watch.begun
    watch(RunEvent(status="running"))
    assert watch.begun
