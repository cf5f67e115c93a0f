"""Shares of the batch that follow the members' measured speed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import group
import numpy as np
import pytest
import torch
from group import Serve, run_group
from hypothesis import given
from hypothesis import strategies as st
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from training.data.balance import ShareBalance, Speed, window_steps
from training.data.batches import BatchSource, Samples
from training.data.even_split import longest, split_evenly
from training.data.sample_order import Cursor, SampleSchedule
from training.exchange.base import SoloExchange
from training.loop.position import EarlyStopping, Position
from training.loop.resuming import HeldSnapshots
from training.loop.uneven_trainer import BalancedTrainer, trainer_class
from training.records.events import StepEvent, WarningEvent
from training.run.local_plan import plan_local_run
from training.tasks.base import Batch

NAMES = ["attic", "cellar", "garage"]
seconds_of_sample = st.floats(0.01, 1.0)


def decided(
    shares: ShareBalance, sizes: dict[int, int], seconds: dict[int, float], steps: int, begin: int = 0
) -> list[str]:
    """Train so many steps at these speeds; return the reasons of the decisions. ``sizes`` follow them."""
    reasons = []
    for step in range(begin + 1, begin + steps + 1):
        if shares.is_due(step):
            speeds = {rank: Speed(each, longest(sizes, seconds), 10) for rank, each in seconds.items()}
            if (decision := shares.decide(step, sizes, speeds, NAMES.__getitem__)) is not None:
                reasons.append(decision.reason)
                sizes.update(decision.sizes)
    return reasons


def test_a_slowed_machine_gives_its_samples_to_the_others_and_is_named() -> None:
    shares, sizes, seconds = ShareBalance(), {0: 8, 1: 8, 2: 8}, dict.fromkeys(range(3), 0.02)
    assert decided(shares, sizes, seconds, 100) == []
    seconds[2] = 0.078
    assert decided(shares, sizes, seconds, 40, begin=100) == [
        "garage computes 3.9 times slower than at the start: its share goes from 8 to 2 of 24 samples, "
        "attic's from 8 to 11, cellar's from 8 to 11"
    ]
    seconds[2] = 0.02
    (reason,) = decided(shares, sizes, seconds, 60, begin=140)
    assert reason.startswith("garage computes 3.9 times faster than at step ") and sizes == {0: 8, 1: 8, 2: 8}


def test_machines_unequal_from_the_start_are_compared_with_each_other() -> None:
    shares, sizes = ShareBalance(accumulation=2), {0: 4, 1: 4, 2: 4}
    assert decided(shares, sizes, {0: 0.1, 1: 0.2, 2: 0.4}, 40) == [
        "garage takes 4.0 times as long for a sample as attic: its share goes from 8 to 2 of 24 samples, "
        "attic's from 8 to 16, cellar's from 8 to 6"
    ]


def test_a_change_that_makes_steps_longer_is_taken_back_and_not_repeated() -> None:
    """A pass of up to 8 samples takes as long as one of 8, as on a GPU that it does not fill."""
    shares, sizes, reasons, seconds_of_pass = ShareBalance(), {0: 8, 1: 8}, [], {0: 0.2, 1: 0.3}
    for step in range(10, 1000, 10):
        seconds_of_pass[1] = 0.3 if step < 900 else 1.2
        seconds = {rank: math.ceil(size / 8) * seconds_of_pass[rank] / size for rank, size in sizes.items()}
        speeds = {rank: Speed(each, longest(sizes, seconds), 10) for rank, each in seconds.items()}
        if shares.is_due(step) and (decision := shares.decide(step, sizes, speeds, NAMES.__getitem__)) is not None:
            reasons.append(decision.reason)
            sizes = decision.sizes
        state = json.loads(json.dumps(shares.state()))
        shares = ShareBalance()
        shares.load(state)  # as of a newcomer
    *before, slowed = reasons[:3]
    assert before == [
        "cellar takes 1.5 times as long for a sample as attic: its share goes from 8 to 6 of 16 samples, "
        "attic's from 8 to 10",
        "to compute a step takes 400 ms instead of 300 ms since attic's share changed at step 20: its share goes from "
        "10 to 8 of 16 samples, cellar's from 6 to 8",
    ]
    assert slowed.startswith("cellar computes 4.0 times slower than at step 40: its share goes from 8 to ")


def test_a_machine_that_slows_down_further_after_a_change_is_no_reason_to_take_it_back() -> None:
    """As one does that grows warm: the steps after a change are longer than before it, but for another reason."""
    shares, sizes, seconds = ShareBalance(), {0: 8, 1: 8, 2: 8}, dict.fromkeys(range(3), 0.02)
    reasons = decided(shares, sizes, seconds, 40)
    for step, slower in ((40, 0.05), (65, 0.2)):
        seconds[2] = slower
        reasons += decided(shares, sizes, seconds, 25 if step == 40 else 60, begin=step)
    assert [reason[: reason.index(", attic")] for reason in reasons] == [
        "garage computes 2.5 times slower than at the start: its share goes from 8 to 4 of 24 samples",
        "garage computes 4.0 times slower than at step 60: its share goes from 4 to 1 of 24 samples",
    ]


def test_shares_settle_where_hosts_have_quotas_of_processor_time() -> None:
    """Seconds of n samples on a host with a quota grow by whole periods; what fits into the first one is fast."""

    def taken(cores: float, samples: int) -> float:
        periods, rest = divmod(0.004 * samples + 0.002, 0.1 * cores)
        return 0.1 * periods + rest

    cores, shares, sizes, longest_step = (0.4, 0.2, 0.1), ShareBalance(), {0: 8, 1: 8, 2: 8}, []
    for step in range(10, 1500, 10):
        seconds = {rank: taken(cores[rank], size) / size for rank, size in sizes.items()}
        longest_step.append(longest(sizes, seconds))
        speeds = {rank: Speed(each, longest_step[-1], 10) for rank, each in seconds.items()}
        if shares.is_due(step) and (decision := shares.decide(step, sizes, speeds, NAMES.__getitem__)) is not None:
            sizes = decision.sizes
    assert len(shares.changes) <= 4 and longest_step[-1] <= 0.15 < 0.3 < longest_step[0], (shares.changes, sizes)


def test_steps_of_a_millisecond_are_left_alone_and_those_of_hours_are_watched_as_often_as_others() -> None:
    assert [window_steps(seconds) for seconds in (1e-9, 0.001, 0.1, 7200.0)] == [1000, 500, 10, 10]
    for seconds, changes in ((1e-4, 0), (900.0, 1)):
        assert len(decided(ShareBalance(), {0: 8, 1: 8}, {0: seconds, 1: 2 * seconds}, 2000)) == changes


@given(st.lists(seconds_of_sample, min_size=2, max_size=6), st.integers(6, 200))
def test_an_even_split_is_the_fastest_of_all_whole_ones(seconds: list[float], total: int) -> None:
    by_rank = dict(enumerate(seconds))
    sizes = split_evenly(total, by_rank)
    assert sum(sizes.values()) == total and min(sizes.values()) >= 1
    for slowest in (rank for rank in sizes if sizes[rank] > 1):
        for other in sizes.keys() - {slowest}:
            moved = {**sizes, slowest: sizes[slowest] - 1, other: sizes[other] + 1}
            assert longest(sizes, by_rank) <= longest(moved, by_rank) * (1 + 1e-9)


@given(st.lists(seconds_of_sample, min_size=2, max_size=5), st.integers(4, 16), st.integers(0, 2**16))
def test_noise_moves_nothing_again_and_again(seconds: list[float], batch: int, seed: int) -> None:
    """Each report is some per cent off, single ones of a member are three times too slow; in the middle one machine is
    slowed to a quarter."""
    rng, shares, sizes = np.random.default_rng(seed), ShareBalance(), dict.fromkeys(range(len(seconds)), batch)
    speeds, total, decisions, slow = dict(enumerate(seconds)), batch * len(seconds), 0, 0
    for step in range(1, 2001):
        if step == 1000:
            speeds[0] *= 4
        if shares.is_due(step):
            slow = 0 if slow else int(rng.random() < 0.1)
            off = {rank: float(rng.lognormal(0, 0.03)) * (3 if slow and rank == 1 else 1) for rank in speeds}
            reports = {rank: Speed(speeds[rank] * off[rank], longest(sizes, speeds), 10) for rank in speeds}
            if (decision := shares.decide(step, sizes, reports)) is not None:
                sizes, decisions = decision.sizes, decisions + 1
            assert sum(sizes.values()) == total and min(sizes.values()) >= 1
        if step in (999, 1999):
            assert longest(sizes, speeds) <= 1.3 * longest(split_evenly(total, speeds), speeds)
    assert decisions <= 6


def test_a_member_without_a_valid_report_stops_every_change() -> None:
    shares, seconds = ShareBalance(), {0: 0.1, 1: 0.4}

    class Told(SoloExchange):
        def __init__(self, other: bytes) -> None:
            super().__init__()
            self.other = other

        def gather(self, name: str, payload: bytes, members: Any = None) -> dict[int, bytes]:
            return {0: json.dumps({"seconds": 0.1, "step": 1.6, "steps": 10}).encode(), 1: self.other}

    for step in range(10, 200, 10):
        lies = (b'{"seconds": %s, "step": 1, "steps": 10}' % lie for lie in (b"-1", b"NaN", b"0", b"1e12"))
        for other in (b"{}", b"nonsense", b'{"seconds": 1, "step": 1}', *lies):
            assert shares.meet(step, {0: 4, 1: 4}, Told(other), NAMES.__getitem__) is None
    honest = Told(json.dumps({"seconds": 0.4, "step": 1.6, "steps": 10}).encode())
    decisions = [shares.meet(step, {0: 4, 1: 4}, honest, NAMES.__getitem__) for step in (210, 220)]
    assert [decision and decision.sizes for decision in decisions] == [None, split_evenly(8, seconds)]


events = st.one_of(
    st.tuples(st.just("speeds"), st.lists(seconds_of_sample, min_size=4, max_size=4)),
    st.tuples(st.sampled_from(["lose", "return", "resume"]), st.integers(0, 3)),
)


@given(st.integers(20, 200), st.integers(1, 2), st.lists(st.tuples(events, st.integers(1, 4)), max_size=30))
def test_an_epoch_holds_each_sample_once_over_any_history(
    n: int, accumulation: int, history: list[tuple[tuple[str, Any], int]]
) -> None:
    """Members that lose one another, come back with the state of another, resume from a snapshot and change shares."""
    schedule, planned = SampleSchedule(n, 7, accumulation), {0: 2, 1: 3, 2: 1, 3: 4}

    def member(state: str = "") -> Position:
        position = Position(EarlyStopping(0, 0.0), batch_sizes=dict(planned), balance=ShareBalance(accumulation))
        if state:
            position.load(json.loads(state), {})
        return position

    live, taken, step = {rank: member() for rank in planned}, list[int](), 0

    def train(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            if min(live.values(), key=lambda one: one.cursor.epoch).cursor.epoch:
                return
            assert len({json.dumps(one.state()) for one in live.values()}) == 1
            assert {sum(one.batch_sizes.values()) for one in live.values()} == {sum(planned[rank] for rank in live)}
            cursors = set()
            for rank, one in live.items():
                batches, after = schedule.step(one.cursor, one.batch_sizes, rank)
                taken.extend(index for batch in batches for index in batch)
                cursors.add(after)
            (after,) = cursors
            step += 1
            for one in live.values():
                one.step, one.cursor = step, after
                one.follow({rank: planned[rank] for rank in live})

    for (event, value), steps in history:
        if event == "lose" and len(live) > 1:
            live.pop(value, None)
        elif event == "return" and value not in live:
            live[value] = member(json.dumps(next(iter(live.values())).state()))
        elif event == "resume":
            live = {rank: member(json.dumps(one.state())) for rank, one in live.items()}
        for one in live.values():
            one.follow({rank: planned[rank] for rank in live})
            if event == "speeds":
                for _ in range(2):
                    speeds = {rank: Speed(value[rank], 10.0, 1000) for rank in live}
                    if (decision := one.balance.decide(step, one.batch_sizes, speeds)) is not None:
                        one.follow({rank: planned[rank] for rank in live})
                        assert one.batch_sizes == decision.sizes
        train(steps)
    while not next(iter(live.values())).cursor.epoch:
        train(1)
    assert sorted(taken) == list(range(n))
    assert sum(next(iter(live.values())).balance.sizes_of(planned).values()) == sum(planned.values())


def test_a_larger_share_is_computed_in_micro_batches_that_fit() -> None:
    task = ToyTask()
    task.prepare(lambda *_: None)
    source = BatchSource(task, SampleSchedule(48, 1, 2), 0, Samples(task, 1), ahead=False)
    batches = source.take(Cursor(), {0: 7, 1: 1}, 0, max_micro_batch=4)
    assert [len(batch) for batch in batches.indices] == [4, 4, 4, 2]
    source.close()


def test_snapshots_of_one_step_tell_who_held_the_last_report() -> None:
    states = [{"strategy": {}, "balance": {"reports": reports}} for reports in (3, 2)] + [{"strategy": {}}]

    class Store:
        directory = Path()

        def __init__(self, state: dict[str, Any]) -> None:
            self._state = state

        def verified_steps(self) -> tuple[list[int], list[str]]:
            return [30], []

        def foreign(self, steps: list[int], plan_hash: str) -> dict[int, str]:
            return {}

        def state(self, step: int) -> dict[str, Any]:
            return self._state

    stores = [Store(state) for state in states]
    rounds = [HeldSnapshots.of(store, "", lambda _: 1).rounds for store in stores]  # type: ignore[arg-type]  # a fake store
    assert rounds == [{30: 4}, {30: 3}, {30: 1}]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "async_diloco"}, "with async_diloco members take samples as fast as they can"),
        ({"split": "label"}, "they belong to one machine each"),
        ({"layout": "pipeline"}, "is for members of one device each"),
    ],
)
def test_balance_is_refused_where_it_moves_nothing(options: dict[str, str], reason: str) -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "job:build", "balance": "on", **options})
    with pytest.raises(BadInput, match=reason) as refused:
        plan_local_run(profile, 2)
    assert refused.value.option == "balance"


@pytest.mark.parametrize(
    ("machines", "run", "follows"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"balance": "on"}, True),
        (True, {"balance": "off"}, False),
        (True, {"shares": "2,1"}, False),
        (True, {"shares": "2,1", "balance": "on"}, True),
    ],
)
def test_shares_follow_speed_between_machines_unless_somebody_set_them(
    machines: bool, run: dict[str, str], follows: bool
) -> None:
    plan = toy_plan(2, run=run)
    if machines:
        members = tuple(member.on_device(machine=NAMES[member.rank]) for member in plan.members)
        plan = plan.model_copy(update={"members": members})
    assert (trainer_class(plan) is BalancedTrainer) == follows


class Recorded(ToyTask):
    """Records the samples that a member trains on; others are only read ahead. More than ``fits`` in a pass need more
    memory than there is."""

    def __init__(self, fits: int) -> None:
        super().__init__(samples=480)
        self.fits, self.trained = fits, list[int]()

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        return super().collate(samples, rngs) | {"index": torch.tensor([index for index, _, _ in samples])}

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if model.training and len(batch["index"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if model.training:
            self.trained += batch["index"].tolist()
        return super().loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"strategy": "diloco", "sync_interval": 10}], ids=["allreduce", "diloco"])
def test_a_run_follows_a_machine_that_is_slowed_in_the_middle(
    tmp_path: Path, serve: Serve, strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members are real; only what a sample takes is scripted, as a busy machine tells nothing of it. One of them
    has memory for 2 samples, and gets a share of 5."""
    notes = ShareBalance.note_step

    class Timed(ShareBalance):
        rank = 0
        steps = 0

        def note_step(self, compute: float, seconds: float, samples: int) -> None:
            self.steps += 1
            slowed = self.rank == 2 and self.steps > 10
            notes(self, samples * (0.2 if slowed else 0.05), 0.8, samples)

    class TimedTrainer(BalancedTrainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._balance = self.position.balance = Timed()
            self._balance.rank = self.rank

    monkeypatch.setattr(group, "trainer_class", lambda plan: TimedTrainer)
    plan = toy_plan(3, training={"max_steps": 0, "epochs": 1}, run={"balance": "on"}, strategy=strategy)
    tasks = {rank: Recorded(fits) for rank, fits in enumerate((4, 2, 4))}
    members = run_group(plan, serve(plan), tasks.__getitem__, tmp_path)
    assert [member.error for member in members.values()] == [None] * 3
    assert sorted(index for task in tasks.values() for index in task.trained) == [*range(480)]
    weights = [torch.cat([p.detach().reshape(-1) for p in m.trainer.parameters]) for m in members.values()]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    steps = {rank: [e for e in m.events if isinstance(e, StepEvent)] for rank, m in members.items()}
    counts = [[steps[rank][number].samples for rank in range(3)] for number in range(40)]
    assert counts == [[4, 4, 4]] * 30 + [[6, 5, 1]] * 10
    told = [e for m in members.values() for e in m.events if isinstance(e, WarningEvent)]
    assert [e.message[:21] for e in told if " its share " not in e.message] == ["4 samples in one pass"]
    assert [(e.message, e.step) for e in told if " its share " in e.message] == [
        (
            "worker-2 computes 4.0 times slower than at the start: its share goes from 4 to 1 of 12 samples, "
            "worker-0's from 4 to 6, worker-1's from 4 to 5",
            30,
        )
    ]
