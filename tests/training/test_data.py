"""Who takes which sample in which step."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput
from training.data.sample_order import (
    Cursor,
    SampleSchedule,
    apportion,
    evaluation_slice,
    group_by_length,
    shares_to_batch_sizes,
)

Batches = list[list[int]]
groups = st.dictionaries(st.integers(0, 9), st.integers(1, 7), min_size=1, max_size=4)
samples = st.integers(1, 120)
accumulations = st.integers(1, 3)


def flat(batches: Batches) -> list[int]:
    return [index for batch in batches for index in batch]


def group_step(schedule: SampleSchedule, cursor: Cursor, group: dict[int, int]) -> tuple[dict[int, Batches], Cursor]:
    """Ask all members; they must agree on the next cursor."""
    answers = {rank: schedule.step(cursor, group, rank) for rank in group}
    (following,) = {after for _, after in answers.values()}
    return {rank: batches for rank, (batches, _) in answers.items()}, following


@given(samples, accumulations, groups)
def test_an_epoch_holds_each_sample_once_whatever_the_shares(n: int, accumulation: int, group: dict[int, int]) -> None:
    schedule = SampleSchedule(n, seed=7, accumulation=accumulation)
    cursor, seen, steps = Cursor(), [], 0
    while cursor.epoch == 0:
        batches, cursor = group_step(schedule, cursor, group)
        seen += [index for rank in batches for index in flat(batches[rank])]
        steps += 1
    assert sorted(seen) == list(range(n))
    assert cursor == Cursor(1, 0)
    assert steps == schedule.total_steps(group, 1)


@given(samples, accumulations, groups, st.integers(0, 5))
def test_group_sees_what_one_worker_with_the_joint_batch_sees(
    n: int, accumulation: int, group: dict[int, int], steps: int
) -> None:
    schedule = SampleSchedule(n, seed=3, accumulation=accumulation)
    alone = SampleSchedule(n, seed=3, accumulation=1)
    joint = {0: accumulation * sum(group.values())}
    cursor = other = Cursor()
    for _ in range(steps):
        batches, cursor = group_step(schedule, cursor, group)
        whole, other = alone.step(other, joint, 0)
        assert [i for rank in sorted(group) for i in flat(batches[rank])] == flat(whole)
        assert cursor == other


@given(samples, accumulations, groups)
def test_full_steps_have_the_agreed_micro_batches(n: int, accumulation: int, group: dict[int, int]) -> None:
    schedule = SampleSchedule(n, seed=1, accumulation=accumulation)
    batches, _ = group_step(schedule, Cursor(), group)
    full = n >= accumulation * sum(group.values())
    for rank, size in group.items():
        assert all(0 < len(batch) <= size for batch in batches[rank])
        assert not full or [len(batch) for batch in batches[rank]] == [size] * accumulation


def test_a_member_may_have_nothing_in_the_last_step() -> None:
    schedule = SampleSchedule(9, seed=0, accumulation=1)
    batches, cursor = group_step(schedule, Cursor(0, 8), {0: 3, 1: 1})
    assert [len(flat(batches[rank])) for rank in (0, 1)] == [1, 0]
    assert batches[1] == []
    assert cursor == Cursor(1, 0)


@given(st.integers(5, 60), st.integers(0, 12))
def test_any_cursor_resumes_the_same_order(n: int, steps: int) -> None:
    schedule, cursor = SampleSchedule(n, seed=5, accumulation=2), Cursor()
    for _ in range(steps):
        _, cursor = schedule.step(cursor, {0: 1, 1: 2}, 1)
    again = Cursor(**json.loads(json.dumps(asdict(cursor))))
    fresh = SampleSchedule(n, seed=5, accumulation=2)
    assert fresh.step(again, {0: 1, 1: 2}, 1) == schedule.step(cursor, {0: 1, 1: 2}, 1)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = SampleSchedule(100, seed=1, accumulation=1)
    second = SampleSchedule(100, seed=2, accumulation=1)
    orders = [s.step(Cursor(epoch), {0: 100}, 0)[0] for s in (first, second) for epoch in (0, 1)]
    assert len({tuple(flat(order)) for order in orders}) == 4


def test_the_order_is_the_same_on_every_machine() -> None:
    batches, _ = SampleSchedule(10, seed=42, accumulation=1).step(Cursor(), {0: 10}, 0)
    assert flat(batches) == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]


def test_a_newcomer_draws_its_own_stream_and_keeps_step() -> None:
    schedule = SampleSchedule(50, seed=0, accumulation=2)
    drawn, cursor = schedule.step(Cursor(0, 10), {0: 4, 1: 4}, rank=2)
    assert [len(batch) for batch in drawn] == [4, 4]
    assert cursor == schedule.step(Cursor(0, 10), {0: 4, 1: 4}, rank=0)[1]
    assert drawn != schedule.step(cursor, {0: 4, 1: 4}, rank=2)[0]
    assert drawn == schedule.step(Cursor(0, 10), {0: 4, 1: 4}, rank=2)[0]


def test_total_steps_count_the_short_steps_of_whole_epochs() -> None:
    schedule = SampleSchedule(10, seed=0, accumulation=1)
    assert schedule.total_steps({0: 4}, 2) == 6
    assert schedule.total_steps({0: 4}, 1.5) == 3 + 2
    assert schedule.total_steps({0: 4}, 0.01) == 1


def test_epoch_fraction() -> None:
    assert SampleSchedule(10, seed=0, accumulation=1).epoch_fraction(Cursor(2, 5), {0: 1}) == 2.5


def test_no_samples_are_refused() -> None:
    with pytest.raises(BadInput, match="no samples"):
        SampleSchedule(0, seed=0, accumulation=1)


@pytest.mark.parametrize("group", [{}, {0: 0}])
def test_a_group_without_a_batch_is_a_programming_error(group: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="batch sizes"):
        SampleSchedule(5, seed=0, accumulation=1).step(Cursor(), group, 0)


@given(st.integers(0, 1000), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_apportion_is_within_one_of_the_exact_share(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    assert all(abs(part - total * w / sum(weights)) < 1 for part, w in zip(parts, weights))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(1, 64))
def test_batch_sizes_keep_the_global_batch(shares: list[float], batch_size: int) -> None:
    sizes = shares_to_batch_sizes(shares, batch_size)
    assert sum(sizes) == len(shares) * batch_size
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("shares", "batch_size", "sizes"),
    [([1, 1], 8, [8, 8]), ([2, 1], 6, [8, 4]), ([1000, 1], 4, [7, 1]), ([0.5, 0.25, 0.25], 4, [6, 3, 3])],
)
def test_shares_become_batch_sizes(shares: list[float], batch_size: int, sizes: list[int]) -> None:
    assert shares_to_batch_sizes(shares, batch_size) == sizes


@pytest.mark.parametrize("shares", [[], [0.0, 1.0], [-1.0], [float("nan")], [float("inf")]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(BadInput, match="shares"):
        shares_to_batch_sizes(shares, 4)


@given(st.integers(0, 50), st.dictionaries(st.integers(0, 9), st.integers(1, 99), min_size=1))
def test_evaluation_slices_cover_the_set_once_by_batch_size(n: int, members: dict[int, int]) -> None:
    parts = {rank: evaluation_slice(n, members, rank) for rank in sorted(members)}
    assert [i for part in parts.values() for i in part] == list(range(n))
    assert all(abs(len(part) - n * members[rank] / sum(members.values())) < 1 for rank, part in parts.items())


@given(samples, accumulations, groups)
def test_with_drop_last_all_steps_are_full(n: int, accumulation: int, group: dict[int, int]) -> None:
    schedule = SampleSchedule(n, seed=7, accumulation=accumulation, drop_last=True)
    size = accumulation * sum(group.values())
    if n < size:
        with pytest.raises(BadInput, match=f"takes {size} samples, but there are {n}"):
            schedule.step(Cursor(), group, min(group))
        return
    cursor, epochs = Cursor(), list[int]()
    for _ in range(schedule.total_steps(group, 2)):
        epochs.append(schedule.start(cursor, group).epoch)
        batches, cursor = group_step(schedule, cursor, group)
        assert sum(len(flat(batches[rank])) for rank in group) == size
    assert epochs == [0] * (n // size) + [1] * (n // size)


def schedule_by_length(n: int, block: int, accumulation: int = 1, seed: int = 7) -> SampleSchedule:
    lengths = np.random.default_rng(n).integers(1, 9, n)
    return SampleSchedule(n, seed, accumulation, lengths=lengths, block=block)


@given(samples, accumulations, groups, st.integers(1, 20))
def test_grouping_by_length_keeps_each_sample_once_and_the_joint_batch(
    n: int, accumulation: int, group: dict[int, int], block: int
) -> None:
    schedule = schedule_by_length(n, block, accumulation)
    alone = schedule_by_length(n, block)
    joint = {0: accumulation * sum(group.values())}
    cursor, seen = Cursor(), []
    while cursor.epoch == 0:
        whole, _ = alone.step(cursor, joint, 0)
        assert alone.longest(cursor, joint, 0, []) == schedule.longest(cursor, group, min(group), [])
        batches, cursor = group_step(schedule, cursor, group)
        taken = [index for rank in sorted(group) for index in flat(batches[rank])]
        assert taken == flat(whole)
        seen += taken
    assert sorted(seen) == list(range(n))


@given(samples, st.integers(1, 20), st.integers(0, 3), st.integers(0, 100))
def test_grouped_order_follows_from_the_cursor_alone(n: int, block: int, epoch: int, offset: int) -> None:
    """Whoever resumes there, or asks for another epoch first, is told the same."""
    cursor = Cursor(epoch, offset % n)
    used = schedule_by_length(n, block)
    used.step(Cursor(epoch + 1, 0), {0: 3}, 0)
    assert used.step(cursor, {0: 3}, 0) == schedule_by_length(n, block).step(cursor, {0: 3}, 0)


@given(st.integers(1, 300), st.integers(1, 5))
def test_blocks_of_a_pool_do_not_overlap_in_length(n: int, block: int) -> None:
    rng = np.random.default_rng(n)
    lengths = rng.integers(1, 100, n)
    order = rng.permutation(n)
    found = group_by_length(order, lengths, block, np.random.default_rng(0))
    whole = n // block * block
    assert sorted(found) == sorted(order) and found[whole:].tolist() == order[whole:].tolist()
    if not whole:
        return
    blocks = lengths[found[:whole]].reshape(-1, block)
    assert blocks[0].max() == lengths[order[:whole]].max()
    if whole <= 50 * block:  # one pool
        ranked = blocks[np.lexsort((blocks.min(axis=1), blocks.max(axis=1)))]
        assert (ranked[:-1].max(axis=1) <= ranked[1:].min(axis=1)).all()


def test_grouping_makes_steps_cheaper_and_epochs_differ() -> None:
    lengths = np.random.default_rng(1).integers(1, 101, 4000)
    by_length = SampleSchedule(4000, 1, 1, lengths=lengths, block=16)
    mixed = SampleSchedule(4000, 1, 1)

    def cost(schedule: SampleSchedule) -> float:
        steps = [schedule.step(Cursor(0, start), {0: 16}, 0)[0][0] for start in range(0, 4000, 16)]
        return float(np.mean([lengths[step].max() for step in steps]))

    assert cost(by_length) < 1.06 * lengths.mean() < 0.6 * cost(mixed)
    first, second = (set(by_length.step(Cursor(epoch, 16), {0: 16}, 0)[0][0]) for epoch in (0, 1))
    assert first != second
