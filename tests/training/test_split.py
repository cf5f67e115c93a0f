"""Members that train on parts of their own."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from group import Serve, run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_task import ToyTask, toy_plan

from profiles.declarations import OptionError
from profiles.errors import BadInput, ExitCode
from profiles.schema import DataSettings, Profile
from profiles.split import DataSplit, split_of
from training.data.partitions import SplitSchedule, deal_samples, schedule_of
from training.data.sample_order import Cursor, SampleSchedule
from training.records.events import StepEvent
from training.records.plan import RunPlan
from training.run.orders import Command, Control
from training.tasks.custom import CustomJob, CustomTask

LABELS = st.lists(st.sampled_from("abcdefgh"), min_size=30, max_size=150).filter(lambda found: len(set(found)) > 5)
KINDS = st.sampled_from(["label", "label:2", "dirichlet:0.3", "dirichlet:100", "speaker"])


@given(LABELS, KINDS, st.integers(2, 5), st.integers(0, 9))
def test_parts_are_disjoint_hold_everything_and_follow_from_the_seed(
    labels: list[str], kind: str, members: int, seed: int
) -> None:
    parts = deal_samples(split_of(kind), labels, members, seed)
    assert len(parts) == members and all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    again = deal_samples(split_of(kind), labels, members, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


@pytest.mark.slow
@settings(max_examples=12)
@given(st.sampled_from([0.05, 0.3, 1.0, 10.0]), st.sampled_from([2, 4, 8]), st.integers(0, 20))
def test_shares_of_a_label_are_spread_as_alpha_says(alpha: float, members: int, seed: int) -> None:
    """The expected sum of the squared shares of a label is (alpha + 1) / (members alpha + 1)."""
    labels = [str(number % 300) for number in range(300 * 100)]
    shares = np.zeros((300, members))
    for member, part in enumerate(deal_samples(DataSplit("dirichlet", alpha=alpha), labels, members, seed)):
        for label, count in Counter(labels[index] for index in part).items():
            shares[int(label), member] = count / 100
    assert shares.sum(axis=1) == pytest.approx(1)
    assert (shares**2).sum(axis=1).mean() == pytest.approx((alpha + 1) / (members * alpha + 1), rel=0.15)
    assert shares.mean(axis=0) == pytest.approx(np.full(members, 1 / members), abs=0.15)


def test_labels_are_few_a_member_and_speakers_stay_whole() -> None:
    labels = [str(number % 10) for number in range(1000)]
    by_label = [{labels[i] for i in part} for part in deal_samples(split_of("label:2"), labels, 5, 0)]
    assert all(len(found) <= 2 for found in by_label) and set().union(*by_label) == set(map(str, range(10)))
    speakers = [name for name, count in {"a": 50, "b": 30, "c": 25, "d": 20, "e": 5}.items() for _ in range(count)]
    parts = deal_samples(split_of("speaker"), speakers, 3, 1)
    found = [{speakers[i] for i in part} for part in parts]
    assert sum(map(len, found)) == 5 and sorted(map(len, parts)) == [35, 45, 50]


@pytest.mark.parametrize(
    ("kind", "labels", "said"),
    [
        ("label", ["a"] * 9, "the same label"),
        ("speaker", [""] * 9, "no speaker"),
        ("speaker", ["a", "b"] * 5, "2 speakers, fewer than the 3 workers"),
        ("label:9", ["a", "b"] * 5, "do not suffice for 9 x 3 shards"),
        ("dirichlet:0.000001", ["a", "b"] * 5, "without a sample"),
    ],
)
def test_what_cannot_be_split_is_refused(kind: str, labels: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        deal_samples(split_of(kind), labels, 3, 0)


@pytest.mark.parametrize("text", ["", "labels", "label:0", "label:x", "dirichlet", "dirichlet:0", "dirichlet:-1", "x"])
def test_no_split(text: str) -> None:
    with pytest.raises(OptionError, match=r"dirichlet:ALPHA"):
        split_of(text)


def schedule(sizes: list[int], batch: int, accumulation: int = 1, drop_last: bool = False) -> SplitSchedule:
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    streams = [
        SampleSchedule(size, rank + 5, accumulation, drop_last, None, accumulation * batch)
        for rank, size in enumerate(sizes)
    ]
    return SplitSchedule(parts, streams)


def taken(plan: SplitSchedule, cursor: Cursor, sizes: dict[int, int], rank: int) -> list[int]:
    return [index for batch in plan.step(cursor, sizes, rank)[0] for index in batch]


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(1, 6), st.integers(1, 2), st.integers(1, 3))
def test_an_epoch_goes_through_every_part_and_once_through_the_largest(
    sizes: list[int], batch: int, accumulation: int, epochs: int
) -> None:
    plan, members = schedule(sizes, batch, accumulation), dict.fromkeys(range(len(sizes)), batch)
    cursor, steps, seen = Cursor(), 0, [Counter[int]() for _ in sizes]
    while cursor.epoch < epochs:
        for rank in members:
            seen[rank].update(taken(plan, cursor, members, rank))
        (cursor,) = {plan.step(cursor, members, rank)[1] for rank in members}
        steps += 1
    assert steps == plan.total_steps(members, epochs)
    for part, found in zip(plan.partitions, seen, strict=True):
        assert found.keys() == set(part.tolist())
        assert max(found.values()) - min(found.values()) <= 1  # those of one pass, which may be under way
    assert set(seen[sizes.index(max(sizes))].values()) == {epochs}
    assert plan.epoch_fraction(cursor, members) == epochs


@given(st.integers(0, 9))
def test_any_cursor_resumes_the_same_order(steps: int) -> None:
    members, cursor = {0: 2, 1: 3}, Cursor()
    for _ in range(steps):
        cursor = schedule([9, 14], 2).step(cursor, members, 0)[1]
    again = Cursor(**json.loads(json.dumps(asdict(cursor))))
    assert again == cursor
    assert schedule([9, 14], 2).step(again, members, 1) == schedule([9, 14], 2).step(cursor, members, 1)


def test_the_part_of_a_lost_member_waits_until_it_is_back() -> None:
    plan, both = schedule([8, 8], 2), {0: 2, 1: 2}
    first = plan.step(Cursor(), both, 0)[1]
    away = first
    for _ in range(3):
        assert set(taken(plan, away, {0: 2}, 0)) <= set(range(8))
        away = plan.step(away, {0: 2}, 0)[1]
    assert plan.epoch_fraction(away, {0: 2}) == 1
    waiting = taken(plan, away, {0: 2}, 1)  # it is there again, and the others do not count it yet
    assert len(waiting) == 2 and set(waiting) <= set(range(8, 16))
    assert plan.step(away, {0: 2}, 1)[1] == plan.step(away, {0: 2}, 0)[1]
    assert taken(plan, away, both, 1) == taken(plan, first, both, 1)


def test_a_newcomer_shares_the_part_of_a_planned_member() -> None:
    plan, all_three = schedule([12, 12], 2), {0: 2, 1: 2, 2: 2}
    cursor, seen = Cursor(), Counter[int]()
    while cursor.parts[:1] != (Cursor(1, 0),):
        seen.update(taken(plan, cursor, all_three, 0) + taken(plan, cursor, all_three, 2))
        cursor = plan.step(cursor, all_three, 1)[1]
    assert seen == Counter(range(12))


def test_drop_last_leaves_no_small_steps_and_refuses_small_parts() -> None:
    plan, both = schedule([5, 9], 2, drop_last=True), {0: 2, 1: 2}
    cursor = Cursor()
    for _ in range(12):
        assert [len(taken(plan, cursor, both, rank)) for rank in both] == [2, 2]
        cursor = plan.step(cursor, both, 0)[1]
    with pytest.raises(BadInput, match="a step takes 2 samples, but there are 1"):
        schedule([1, 9], 2, drop_last=True).start(Cursor(), both)


def test_the_longest_sample_is_that_of_a_members_own_part() -> None:
    lengths = np.asarray([3, 9, 3, 3, 5, 5])
    parts = [np.asarray([0, 1, 2, 3]), np.asarray([4, 5])]
    streams = [SampleSchedule(len(part), 0, 1, False, lengths[part], 2) for part in parts]
    plan, both = SplitSchedule(parts, streams, lengths), {0: 2, 1: 2}
    assert plan.longest(Cursor(), both, 1, [4, 5]) == 5
    assert plan.longest(Cursor(), both, 0, taken(plan, Cursor(), both, 0)) == 9  # the longest come first
    assert plan.longest(Cursor(), {0: 2}, 1, [4]) == 5


class Labelled(ToyTask):
    """Samples of three classes of unequal size."""

    def labels(self, of: Literal["label", "speaker"]) -> list[str]:
        return [str(min(2, index % 5)) for index in range(len(self.train))]


def split_plan(split: str, members: int = 2, resume: bool = False, **training: Any) -> RunPlan:
    how = {"strategy": "diloco", "sync_interval": 3}
    plan = toy_plan(members, training, snapshot={"snapshot_interval": 5}, strategy=how, resume=resume)
    data = DataSettings(split=split)
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"data": data})})


@pytest.mark.slow
def test_members_train_on_their_parts_alone_and_resume_with_the_same_losses(tmp_path: Path, serve: Serve) -> None:
    whole, tasks = split_plan("dirichlet:0.4"), {rank: Labelled() for rank in range(2)}
    members = run_group(whole, serve(whole), tasks.__getitem__, tmp_path / "whole")
    assert [member.error for member in members.values()] == [None, None]
    found = schedule_of(whole, tasks[0])
    assert isinstance(found, SplitSchedule)
    for rank, part in enumerate(found.partitions):
        assert set(tasks[rank].seen) <= set(part.tolist())
    again = split_plan("dirichlet:0.4", resume=True)
    resumed = run_group(again, serve(again), lambda _: Labelled(), tmp_path / "whole")
    for rank, member in resumed.items():
        assert member.error is None
        after, before = (
            [(e.step, e.loss) for e in m.events if isinstance(e, StepEvent)] for m in (member, members[rank])
        )
        assert [step for step, _ in after] == [11, 12] and set(after) <= set(before)
    assert split_plan("label").hash() != whole.hash()


@pytest.mark.slow
def test_nobody_trains_on_the_part_of_a_member_that_left(tmp_path: Path, serve: Serve) -> None:
    plan, leaving = split_plan("label"), Control()
    leaving.post(Command(command="stop", at_step=6))
    tasks = {rank: Labelled() for rank in range(2)}
    controls = {0: Control(), 1: leaving}
    members = run_group(plan, serve(plan), tasks.__getitem__, tmp_path, controls.__getitem__)
    assert [members[rank].ending for rank in range(2)] == [ExitCode.DONE, ExitCode.STOPPED]
    found = schedule_of(plan, tasks[0])
    assert isinstance(found, SplitSchedule)
    assert set(tasks[0].seen) == set(found.partitions[0].tolist())
    stayed, left = (members[rank].trainer.position.cursor for rank in range(2))
    assert stayed.parts[0] == Cursor(2, 0) and left.parts == (Cursor(1, 0), Cursor(1, 0))
    assert stayed.parts[1] == Cursor(1, 0)  # what was its share until the others heard that it had left goes back


@pytest.mark.slow
def test_members_whose_labels_differ_are_refused(tmp_path: Path, serve: Serve) -> None:
    class Other(Labelled):
        def labels(self, of: Literal["label", "speaker"]) -> list[str]:
            return super().labels(of)[::-1]

    plan = split_plan("label")
    members = run_group(plan, serve(plan), lambda rank: Other() if rank else Labelled(), tmp_path)
    assert all("by which they are split" in str(member.error) for member in members.values())


def test_one_member_alone_trains_as_without_a_split() -> None:
    task = ToyTask()
    task.prepare(lambda *_: None)
    assert isinstance(schedule_of(split_plan("label", 1), task), SampleSchedule)
    with pytest.raises(BadInput, match="'toy' jobs have no label"):
        schedule_of(split_plan("label"), task)


def labels_of(train: Any, of: Literal["label", "speaker"] = "label") -> list[str]:
    task = CustomTask(Profile(name="x"), lambda: CustomJob(torch.nn.Linear(1, 1), train))
    task.prepare(lambda *_: None)
    return list(task.labels(of))


class Broken(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            raise OSError("no such file")
        return super().__getitem__(index)


def test_labels_of_custom_samples() -> None:
    x = torch.zeros(1)
    assert labels_of([(x, torch.tensor(2)), (x, torch.tensor([1.0]))]) == ["2", "1"]
    assert labels_of([{"x": x, "label": "cat"}, {"x": x, "label": "dog"}]) == ["cat", "dog"]
    assert labels_of(Broken([(x, 3), (x, 3), (x, True)])) == ["3", "", "1"]
    assert labels_of([{"x": x, "speaker": "ann"}, {"x": x, "speaker": 7}], "speaker") == ["ann", "7"]
    known = Broken([(x, 3), (x, 3)])
    known.targets = torch.tensor([4, 5])  # type: ignore[attr-defined]  # as data sets of torchvision
    assert labels_of(known) == ["4", "5"]


@pytest.mark.parametrize("target", [0.5, torch.zeros(3), None, float("nan")])
def test_a_target_that_is_no_class_is_refused(target: Any) -> None:
    with pytest.raises(BadInput, match="no label to split by"):
        labels_of([(torch.zeros(1), target)])


def test_samples_without_target_or_speaker_are_refused() -> None:
    with pytest.raises(BadInput, match="no target"):
        labels_of([torch.zeros(3)])
    with pytest.raises(BadInput, match="do not say who speaks"):
        labels_of([(torch.zeros(3), 1)], "speaker")
