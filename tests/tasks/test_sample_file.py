"""Data sets as files: whatever a sample may hold comes back the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.utils.data import TensorDataset

from profiles.errors import BadInput
from training.tasks.sample_file import SampleFile, write_samples

NUMBERS = st.sampled_from(["float64", "float32", "float16", "int64", "int32", "int8", "uint8", "uint16", "bool"])
ARRAYS = NUMBERS.flatmap(lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0, max_side=3)))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    ARRAYS,
    ARRAYS.map(lambda values: torch.from_numpy(np.array(values))),
    ARRAYS.filter(lambda values: values.size == 1).map(lambda values: values.reshape(())[()]),
)
SAMPLES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), parts, max_size=3),
    ),
    max_leaves=6,
)


def round_trip(samples: Any) -> SampleFile:
    with tempfile.TemporaryDirectory() as folder:
        write_samples(samples, Path(folder) / "data.safetensors", "data")
        return SampleFile(Path(folder) / "data.safetensors")


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and same(one.numpy(), other.numpy())
    if isinstance(one, (np.ndarray, np.generic)):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(SAMPLES, max_size=6))
def test_every_sample_comes_back_the_same(samples: list[Any]) -> None:
    found = round_trip(samples)
    assert len(found) == len(samples)
    assert all(same(found[index], sample) for index, sample in enumerate(samples))


def test_bfloat16_and_views_come_back() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    found = round_trip([whole.T, whole[:, 1].to(torch.bfloat16).requires_grad_()])
    assert torch.equal(found[0], whole.T)
    assert torch.equal(found[1], whole[:, 1].to(torch.bfloat16)) and not found[1].requires_grad


def test_a_sample_is_a_copy() -> None:
    found = round_trip(TensorDataset(torch.ones(2, 3)))
    found[0][0].zero_()
    assert torch.equal(found[0][0], torch.ones(3))
    assert torch.equal(found[-1][0], torch.ones(3))


def test_an_iteration_ends() -> None:
    assert [int(value) for value in round_trip([1, 2, 3])] == [1, 2, 3]  # type: ignore[attr-defined]  # by index, as DataLoader does


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (object(), "sample 1 holds a value of type builtins.object"),
        ({("a", 1): 1}, "a mapping with a key of type tuple"),
        (torch.eye(2).to_sparse(), "sample 1 holds float32 values"),
        (2**63, "a value of type builtins.int"),
        (np.array(["text"]), "sample 1 holds"),
    ],
)
def test_what_is_not_kept_is_named(tmp_path: Path, sample: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        write_samples([1, sample], tmp_path / "data.safetensors", "train_dataset")
    assert list(tmp_path.iterdir()) == []


def test_a_large_data_set_is_refused_with_the_limit(tmp_path: Path) -> None:
    said = r"train_dataset: more than 1.0 kB after 2 of 9 samples \(give a module-level function"
    with pytest.raises(BadInput, match=said):
        write_samples([torch.ones(150)] * 9, tmp_path / "data.safetensors", "train_dataset", largest=1000)


def test_a_sample_that_fails_is_named(tmp_path: Path) -> None:
    class Faulty(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise KeyError("oops")

    with pytest.raises(BadInput, match="train_dataset: sample 0 of 1: KeyError: 'oops'"):
        write_samples(Faulty([1]), tmp_path / "data.safetensors", "train_dataset")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"rubbish" * 9):
        (tmp_path / "data.safetensors").write_bytes(content)
        (tmp_path / "data.json").write_text('{"forms": [], "pools": []}')
        with pytest.raises(BadInput, match="not a file of samples"):
            SampleFile(tmp_path / "data.safetensors")
