"""Snapshots by time: all members write them after the same steps, whatever each one's clock says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from group import Serve, run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_exchange import Room, RoomExchange
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.optimisation import SnapshotSettings
from tests.waiting import PATIENCE
from training.exchange.base import Exchange, SoloExchange
from training.records.events import SnapshotEvent
from training.records.plan import RunPlan
from training.snapshots.snapshot_pace import SnapshotCost, SnapshotPace

StepSeconds = Callable[[int], float]
FIVE_MINUTES = 300.0
FREE = SnapshotCost()


class Walk:
    """A member with a clock of its own, whose steps take what ``seconds`` says."""

    def __init__(
        self, seconds: StepSeconds, total: int, exchange: Exchange, interval: str = "5m", begin: float = 0.0,
        cost: SnapshotCost = FREE,
    ) -> None:  # fmt: skip
        self.now, self._seconds, self.total = begin, seconds, total
        options = SnapshotSettings(snapshot_interval=interval)
        self._cost = cost._replace(begun=begin)
        self.pace = SnapshotPace(options, self, exchange, clock=lambda: self.now, total_steps=total)
        self.looks = 0
        self.begin = begin

    def cost(self) -> SnapshotCost:
        return self._cost

    def write(self) -> None:
        self._cost = self._cost._replace(begun=self.now)

    def to(self, last: int, meets_every: int = 1, first: int = 1) -> list[tuple[int, float]]:
        """Train to a step; return the steps of snapshots, and the seconds since the begin."""
        written = []
        for step in range(first, last + 1):
            self.now += self._seconds(step)
            if self.pace.is_due(step, step % meets_every == 0):
                self.write()
                written.append((step, self.now - self.begin))
        return written


def gaps(written: Sequence[tuple[int, float]], end: float) -> list[float]:
    moments = [0.0, *(moment for _, moment in written), end]
    return [after - before for before, after in itertools.pairwise(moments)]


def together(members: Sequence[Walk], **how: Any) -> list[list[tuple[int, float]]]:
    """Let all members train to the end, a thread each."""
    written: dict[int, list[tuple[int, float]]] = {}

    def train(number: int) -> None:
        written[number] = members[number].to(members[number].total, **how)

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(written) == len(members), "a member waits for another one"
    return [written[number] for number in range(len(members))]


@pytest.mark.parametrize(("step", "total"), [(0.02, 100_000), (5.0, 600), (400.0, 20)])
def test_nobody_loses_more_than_five_minutes_or_a_step(step: float, total: int) -> None:
    walk = Walk(lambda number: step, total, SoloExchange())
    written = walk.to(total)
    assert max(gaps(written, walk.now)) <= max(FIVE_MINUTES + step, 1.5 * step)
    assert min(gaps(written, walk.now)[:-1]) >= 0.9 * min(FIVE_MINUTES, 0.1 * step * total)


@pytest.mark.parametrize(("step", "total"), [(0.02, 3000), (2.0, 100), (0.5, 1200)])
def test_a_short_run_loses_a_tenth_at_most(step: float, total: int) -> None:
    walk = Walk(lambda number: step, total, SoloExchange())
    assert max(gaps(walk.to(total), walk.now)) <= 0.1 * step * total + step


def test_a_run_of_seconds_writes_none() -> None:
    assert not Walk(lambda step: 0.01, 400, SoloExchange()).to(400)


def test_a_slow_first_step_postpones_nothing() -> None:
    walk = Walk(lambda step: 120.0 if step == 1 else 0.1, 9000, SoloExchange())  # as a model that is compiled
    assert max(gaps(walk.to(9000), walk.now)) <= 140


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_steps_that_take_ten_times_as_long_from_now_on(factor: float) -> None:
    walk = Walk(lambda step: 1.0 if step < 1000 else factor, 3000, SoloExchange())
    assert max(gaps(walk.to(3000), walk.now)) <= FIVE_MINUTES + 10 * 15


def test_looks_are_rare_where_members_meet_rarely() -> None:
    class Counting(SoloExchange):
        gathered = 0

        def gather(self, *args: Any, **how: Any) -> dict[int, bytes]:
            self.gathered += 1
            return super().gather(*args, **how)

    exchange = Counting()
    walk = Walk(lambda step: 0.1, 36_000, exchange)
    written = walk.to(36_000, meets_every=100)
    assert len(written) in (11, 12) and exchange.gathered < 3600 / 10 + 20


def test_between_two_rare_meetings_snapshots_are_written_too() -> None:
    walk = Walk(lambda step: 2.0, 4000, SoloExchange())
    assert max(gaps(walk.to(4000, meets_every=2000), walk.now)) <= FIVE_MINUTES + 2


@pytest.mark.parametrize(
    ("cost", "shortest"), [((0.2, 0.5), 20.0), ((20.0, 20.0), FIVE_MINUTES), ((0.1, 400.0), 800.0)],
    ids=["a hundredth", "the interval at most", "the disk is busy half the time"],
)  # fmt: skip
def test_a_snapshot_that_costs_more_is_written_more_rarely(cost: tuple[float, float], shortest: float) -> None:
    walk = Walk(lambda step: 0.1, 1000 if shortest < FIVE_MINUTES else 40_000, SoloExchange(), cost=SnapshotCost(*cost))
    assert walk.to(walk.total)[0][1] == pytest.approx(shortest, abs=0.3)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 30), min_size=2, max_size=4), st.integers(1, 50), st.integers(0, 2**32))
def test_all_write_after_the_same_steps(seconds: list[float], meets_every: int, seed: int) -> None:
    room = Room(len(seconds), lambda name: ())
    walks = [  # mypy infers no type of a lambda with defaults
        Walk(lambda step, one=one, rank=rank: one * (1 + (step * 7919 + rank * seed) % 5), 150,  # type: ignore[misc]
             RoomExchange(room, rank), "90s", begin=3600.0 * rank)
        for rank, one in enumerate(seconds)
    ]  # fmt: skip
    steps = [[step for step, _ in one] for one in together(walks, meets_every=meets_every)]
    assert steps == [steps[0]] * len(seconds)


def test_a_newcomer_takes_the_next_look_from_the_others() -> None:
    room = Room(2, lambda name: ())
    old = Walk(lambda step: 1.0, 2000, RoomExchange(room, 0))
    alone = Walk(lambda step: 1.0, 2000, SoloExchange())
    assert alone.to(500)
    new = Walk(lambda step: 3.0, 2000, RoomExchange(room, 1), begin=1e6)
    for pace in (old.pace, new.pace):
        pace.load(alone.pace.state(), 500)
    first, second = together([old, new], first=501)
    assert [step for step, _ in first] == [step for step, _ in second] and first


def test_one_whose_clock_says_so_asks_for_a_meeting_until_there_was_one() -> None:
    walk = Walk(lambda step: 1.0, 10_000, SoloExchange())
    walk.pace.looks_at_every_meeting = True
    walk.to(100, meets_every=50)
    assert not walk.pace.is_overdue(101)
    walk.now += 290
    assert walk.pace.is_overdue(120)
    assert walk.pace.is_due(125, meets=True)
    walk.write()
    assert not walk.pace.is_overdue(126)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "async_diloco", "noloco", "sparta", "demo"])
def test_a_group_resumes_from_a_snapshot_by_time(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr("profiles.optimisation._LEAST_SECONDS", 0.02)
    own = {name: {"sync_interval": 5} for name in ("diloco", "noloco", "async_diloco")}

    def plan(resume: bool = False) -> RunPlan:
        training = {"max_steps": 120}
        options = {"strategy": strategy, "owned": {strategy: own[strategy]} if strategy in own else {}}
        return toy_plan(2, training, snapshot={"snapshot_interval": "5m"}, strategy=options, resume=resume)

    first = run_group(plan(), serve(plan()), lambda _: ToyTask(), tmp_path)
    steps = [[e.step for e in member.events if isinstance(e, SnapshotEvent)] for _, member in sorted(first.items())]
    assert [member.error for member in first.values()] == [None] * 2
    assert steps[0] and steps[0] == steps[1]
    again = run_group(plan(resume=True), serve(plan(resume=True)), lambda _: ToyTask(), tmp_path)
    assert [member.error for member in again.values()] == [None] * 2
    assert {member.trainer.position.attempts[-1][1] for member in again.values()} == {steps[0][-1]}


@pytest.mark.parametrize(
    ("text", "steps", "seconds"), [("5m", 0, 300), ("90 s", 0, 90), ("1h", 0, 3600), ("250", 250, 0), ("0", 0, 0)]
)
def test_the_interval_is_a_time_or_a_number_of_steps(text: str, steps: int, seconds: int) -> None:
    chosen = profile_from_options("nanogpt", {"snapshot_interval": text}).snapshot
    assert (chosen.steps, chosen.seconds) == (steps, seconds)
    assert SnapshotSettings.model_validate_json(chosen.model_dump_json()) == chosen


@pytest.mark.parametrize("text", ["5x", "-3", "0.5", "0.1s", "30d", "soon", "true"])
def test_another_interval_is_one_line(text: str) -> None:
    with pytest.raises(BadInput, match="neither a time of a second to a week, such as 5m, 90s or 1h, nor steps"):
        profile_from_options("nanogpt", {"snapshot_interval": text})


def test_a_run_with_the_earlier_default_keeps_its_hash() -> None:
    assert toy_plan(snapshot={"snapshot_interval": 200}).hash() == toy_plan(snapshot={"snapshot_interval": "5m"}).hash()
    assert toy_plan(snapshot={"snapshot_interval": 300}).hash() != toy_plan(snapshot={"snapshot_interval": "5m"}).hash()
