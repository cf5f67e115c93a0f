"""Training data that come one after the other: who takes which, and where a resumed run goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from profiles.errors import BadInput, RunFailed
from tests.tasks.tiny_tasks import custom_task
from training.data.sample_order import Cursor
from training.data.stream_schedule import StreamSchedule
from training.local_trainer import LocalTrainer
from training.numerics.randomness import preserved_generators
from training.tasks.own_code.streams import Sampled, Stream, read_all

CPU = torch.device("cpu")
SIZE = 10


class Shuffled(IterableDataset[int]):
    """Draws its order, and something for each sample, from Python's generator."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.passes = size, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.passes.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(self.size), self.size)
        return ((number, random.random()) for number in order)


def hugging_face(size: int = SIZE) -> Any:
    return datasets.Dataset.from_dict({"n": [*range(size)]}).to_iterable_dataset(num_shards=2)


def weighted(size: int = SIZE) -> Sampled:
    return Sampled([*range(size)], WeightedRandomSampler([1.0] * size, size, generator=torch.Generator()))


class Forgetful(IterableDataset[int]):
    """Its state is behind a batch of rows that it has read ahead, as in some versions of datasets."""

    def __init__(self) -> None:
        self.begin = self.read = 0

    def __iter__(self) -> Iterator[int]:
        for begin in range(self.begin, SIZE, 3):
            self.read = begin + 3
            yield from range(begin, min(SIZE, begin + 3))
        self.begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["read"]


SOURCES: list[Callable[[], Any]] = [
    Shuffled,
    hugging_face,
    weighted,
    Forgetful,
    lambda: hugging_face().shuffle(3, buffer_size=4),
    lambda: hugging_face().map(lambda row: {"n": row["n"] + 1}).with_format("torch"),
]


def taken(stream: Stream, positions: Any) -> list[Any]:
    with preserved_generators(CPU):
        return [stream[position] for position in positions]


@pytest.mark.parametrize("source", SOURCES)
def test_members_take_turns_in_what_one_reader_reads(source: Callable[[], Any]) -> None:
    whole = taken(Stream(source(), 5), range(3 * SIZE))
    sizes = {0: 2, 1: 3}
    for rank in sizes:
        stream, schedule, cursor = Stream(source(), 5), StreamSchedule(None, 5, 1), Cursor()
        for step in range(6):
            batches, cursor = schedule.step(cursor, sizes, rank)
            begin = 5 * step + (2 if rank else 0)
            assert batches == [[*range(begin, begin + sizes[rank])]]
            assert taken(stream, batches[0]) == whole[begin : begin + sizes[rank]]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("position", [0, 1, 7, SIZE, 2 * SIZE + 3])
def test_a_resumed_stream_goes_on_at_the_exact_position(source: Callable[[], Any], position: int) -> None:
    whole = taken(Stream(source(), 5), range(3 * SIZE))
    first = Stream(source(), 5)
    taken(first, range(min(3 * SIZE, position + 4)))  # batches of later steps are made ahead
    state = json.loads(json.dumps(first.state_at(position)))
    again = Stream(source(), 5)
    taken(again, [0])  # as the comparison of the data does
    again.restore(state)
    assert taken(again, range(position, 3 * SIZE)) == whole[position:]


def test_a_state_of_the_data_spares_reading_over_them() -> None:
    first = Stream(hugging_face(), 5)
    taken(first, range(9))
    assert first.state_at(8)["position"] == 8 and first.state_at(8)["next"]
    assert Stream(hugging_face().shuffle(3, buffer_size=4), 5).state_at(8)["source"] is None  # its buffer would be lost


@pytest.mark.parametrize("source", SOURCES)
def test_a_step_that_is_made_again_has_the_same_samples(source: Callable[[], Any]) -> None:
    stream = Stream(source(), 5)
    assert taken(stream, [4, 5, 12]) == taken(stream, [4, 5, 12])


def test_passes_hear_their_number_and_differ() -> None:
    source = Shuffled()
    read = taken(Stream(source, 5), range(2 * SIZE))
    assert source.passes == [0, 1]
    first, second = ([number for number, _ in read[half]] for half in (slice(SIZE), slice(SIZE, None)))
    assert sorted(first) == sorted(second) == [*range(SIZE)] and first != second


def test_max_train_samples_are_the_first_of_each_pass() -> None:
    assert [row["n"] for row in taken(Stream(hugging_face(), 5, 3), range(6))] == [0, 1, 2, 0, 1, 2]


def test_an_evaluation_reads_one_pass() -> None:
    assert len(read_all(Shuffled(), 5, 0)) == SIZE
    assert len(read_all(weighted(), 5, 0)) == SIZE
    assert len(read_all(Shuffled(), 5, 4)) == 4
    with pytest.raises(BadInput, match="more than 5 samples.*max_eval_samples"):
        read_all(Shuffled(), 5, 0, most=5)


def fails_after_two() -> Iterator[int]:
    yield from (0, 1)
    raise ValueError("torn shard")


class Torn(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return fails_after_two()


def test_a_stream_that_breaks_does_not_begin_again() -> None:
    with pytest.raises(RunFailed, match="Torn failed at sample 2: .*torn shard"):
        taken(Stream(Torn(), 5), range(4))
    with pytest.raises(BadInput, match="Shuffled gives no samples"):
        taken(Stream(Shuffled(0), 5), [0])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (fails_after_two(), "gives its samples only once"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"n": [1]})}), "DatasetDict of train"),
        (DataLoader([1, 2], batch_size=None), "makes no batches"),
        (DataLoader([1, 2], sampler=DistributedSampler([1, 2], 2, 0)), "divides its samples by DistributedSampler"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(data: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        LocalTrainer(torch.nn.Linear(1, 1), data, loss=torch.nn.functional.mse_loss).fit()


def test_the_documents_stream_reads_its_files(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "custom-models.md").read_text()
    snippet = next(code for code in page.split("```python\n")[1:] if "class Lines" in code).partition("```")[0]
    names: dict[str, Any] = {}
    exec(snippet, names)
    paths = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(paths):
        path.write_text(f"{number} 1\n{number} 2\n")
    assert sorted(taken(Stream(names["Lines"](paths), 5), range(4))) == [[0, 1], [0, 2], [1, 1], [1, 2]]


def test_lists_of_numbers_in_rows_of_hugging_face_are_tensors() -> None:
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "label": [0, 1, 0], "text": [*"abc"]})
    for data in (rows, rows.to_iterable_dataset()):
        task = custom_task(torch.nn.Linear(2, 1), data)
        batch = task.collate([task.train[0], task.train[1]], None)["data"]
        assert batch["x"].tolist() == [[1.0, 2.0], [3.0, 4.0]] and batch["text"] == ["a", "b"]
