"""Which batches of a script's loader each of its processes gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from profiles.errors import BadInput
from training.session.prepared_loader import PreparedLoader

CPU = torch.device("cpu")


def of_both(loader: DataLoader[Any], seed: int = 1) -> list[PreparedLoader]:
    return [PreparedLoader(loader, rank, 2, CPU, seed) for rank in range(2)]


def taken(loader: PreparedLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def in_order(batches: list[list[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


def test_batches_are_dealt_out_in_turn_and_the_last_turn_is_filled_up() -> None:
    first, second = of_both(DataLoader(range(10), batch_size=2))
    assert taken(first) == [[0, 1], [4, 5], [8, 9]]
    assert taken(second) == [[2, 3], [6, 7], [0, 1]]
    assert len(first) == len(second) == 3


def test_both_shuffle_alike_and_every_pass_anew_whatever_random_numbers_they_have_drawn() -> None:
    first, second = of_both(DataLoader(range(8), batch_size=2, shuffle=True))
    torch.manual_seed(3)
    passes = [taken(first), taken(first)]
    torch.manual_seed(4)
    others = [taken(second), taken(second)]
    for mine, theirs in zip(passes, others, strict=True):
        assert sorted(number for batch in mine + theirs for number in batch) == list(range(8))
    assert passes[0] != passes[1]


def test_a_loop_of_its_own_over_the_loader_begins_another_pass() -> None:
    """``next(iter(loader))`` in every step, as reported of other launchers, gives other batches each time."""
    loader, _ = of_both(DataLoader(range(100), batch_size=2, shuffle=True))
    drawn = [next(iter(loader)).tolist() for _ in range(4)]
    assert len({tuple(batch) for batch in drawn}) == 4
    assert loader.epoch == 3


def test_collate_function_and_sampler_of_the_script_stay() -> None:
    class Backwards(Sampler[int]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter((3, 2, 1, 0))

    loader = DataLoader(
        range(4), batch_size=1, sampler=Backwards(), collate_fn=lambda samples: torch.tensor(samples) * 10
    )
    assert [taken(one) for one in of_both(loader)] == [[[30], [10]], [[20], [0]]]


def test_a_sampler_that_has_no_length_is_refused_with_what_to_do() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 0

    with pytest.raises(BadInput, match="Endless has no length.*__len__"):
        of_both(DataLoader(range(4), batch_sampler=Endless()))


def test_a_loader_that_the_script_has_split_itself_stays_as_it_is() -> None:
    split = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=True, seed=5)  # type: ignore[arg-type]  # its length is all it reads
    loader = PreparedLoader(DataLoader(range(8), batch_size=2, sampler=split), 1, 2, CPU, 1)
    first, second = taken(loader), taken(loader)
    assert len(first) == len(loader) == 2
    assert first != second, "the pass reaches the sampler"


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler])
def test_batches_that_the_data_make_themselves_are_dealt_out(sampler: Any) -> None:
    """``batch_size=None``, with which other launchers fail."""
    data = [torch.full((3,), number) for number in range(4)]
    loader = DataLoader(data, batch_size=None, sampler=sampler(data))  # type: ignore[arg-type]  # of batches, as torch allows
    first, second = of_both(loader)
    drawn = [batch[0] for batch in taken(first) + taken(second)]
    assert sorted(drawn) == [0, 1, 2, 3] and len(first) == 2
    assert first.take_counts()[0] == 6, "the length of the first tensor counts"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


def test_a_stream_is_read_by_both_and_its_last_turn_left_out_if_it_is_not_full() -> None:
    first, second = of_both(DataLoader(Stream(), batch_size=2, drop_last=True))
    assert (taken(first), taken(second)) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])


@pytest.mark.parametrize("data", [range(40), Stream()])
def test_a_pass_that_was_left_goes_on_where_it_was(data: Any) -> None:
    loader, _ = of_both(DataLoader(data, batch_size=2, shuffle=not isinstance(data, IterableDataset)))
    whole = taken(loader)
    begun, _ = of_both(DataLoader(data, batch_size=2, shuffle=not isinstance(data, IterableDataset)))
    for _ in zip(range(1), begun, strict=False):
        pass
    state = begun.state_dict()
    again, _ = of_both(DataLoader(data, batch_size=2, shuffle=not isinstance(data, IterableDataset)))
    again.load_state_dict(state)
    assert again.next_epoch == 0
    assert taken(again) == whole[state["batches"] :]
    assert again.next_epoch == 1


def test_what_else_a_loader_is_asked_for_is_the_scripts() -> None:
    data = list(range(4))
    loader, _ = of_both(DataLoader(data, batch_size=2))
    assert (loader.dataset, loader.batch_size) == (data, 2)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_both_draw_alike_from_a_generator_of_the_script(seeds: tuple[int, int]) -> None:
    """As the notes on reproducibility of PyTorch seed a loader; the second pass has another order."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    loaders = [DataLoader(range(16), batch_size=2, shuffle=True, generator=generator) for generator in generators]
    mine, theirs = (PreparedLoader(loader, rank, 2, CPU, 1) for rank, loader in enumerate(loaders))
    passes = [in_order(taken(mine) + taken(theirs)) for _ in range(2)]
    assert passes == [list(range(16))] * 2
    assert taken(mine) != taken(mine)


class Shuffled(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16).tolist())


def test_a_stream_that_shuffles_itself_has_one_order_on_both_and_hears_the_pass() -> None:
    data = Shuffled()
    first, second = of_both(DataLoader(data, batch_size=2))
    torch.manual_seed(3)
    mine = taken(first)
    torch.manual_seed(4)
    assert in_order(mine + taken(second)) == list(range(16))
    assert taken(first) != mine and data.epoch == 1


def test_a_pass_draws_nothing_from_the_random_numbers_of_the_script() -> None:
    """Else dropout after a resume in the middle of a pass would be another one."""
    for loader in (DataLoader(range(8), shuffle=True), DataLoader(Shuffled())):
        first, _ = of_both(loader)
        before = torch.get_rng_state()
        taken(first)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("loader", [DataLoader(range(3), batch_size=8, drop_last=True), DataLoader(Stream(), 11)])
def test_a_pass_without_a_batch_is_refused_as_a_loop_until_some_step_would_never_end(loader: Any) -> None:
    first, _ = of_both(loader)
    with pytest.raises(BadInput, match="has none for each of 2 processes"):
        taken(first)
