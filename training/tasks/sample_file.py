"""A data set as one safetensors file: what a map-style data set travels as, without pickle.

A sample may hold tensors, numpy arrays, numbers, booleans, texts, bytes and ``None`` in tuples, lists and mappings.
All values of one type lie behind each other in one flat tensor (a *pool*), in the order of the samples. A JSON file
beside it has the *forms*: what the samples look like, each once. Two more tensors say which form a sample has
(``form``, [samples]) and where its values begin in each pool (``starts``, [samples, pools]).
"""

from __future__ import annotations

import json
import struct
import tempfile
from array import array
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
import torch

from profiles.errors import BadInput, MusterError
from training.tasks.base import SizedDataset

LARGEST = 2_000_000_000
"""Bytes a data set may have when it is written out."""
_HELD = "tensors, arrays, numbers, texts, bytes and None in tuples, lists and mappings"
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint64": "U64", "uint32": "U32", "uint16": "U16",
}  # fmt: skip
_FORM, _STARTS = "form", "starts"


def write_samples(data: SizedDataset, path: Path, what: str, largest: int = LARGEST) -> None:
    """Write all samples to ``path`` and their forms beside it (``.json``).

    Raises:
        BadInput: a sample cannot be had or holds something else, or all together are too large.
        OSError: a file cannot be written.
    """
    with ExitStack() as stack:
        writer = _Writer(lambda: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)))
        for number in range(len(data)):
            sample = _sample(data, number, what)
            try:
                writer.add(sample)
            except TypeError as error:
                raise BadInput(
                    f"{what}: sample {number} holds {error}, which is not sent to machines",
                    f"samples may hold {_HELD}; or give a module-level function that makes the data set there",
                ) from None
            if writer.size > largest:
                raise BadInput(
                    f"{what}: more than {largest / 1e9:g} GB after {number + 1} of {len(data)} samples",
                    "give a module-level function that makes the data set on each machine, from data that are there",
                )
        writer.finish(path)


def _sample(data: SizedDataset, number: int, what: str) -> Any:
    try:
        return data[number]
    except MusterError:
        raise
    except Exception as error:  # the user's own code may raise anything
        text = " ".join(str(error).split())
        raise BadInput(
            f"{what}: sample {number} of {len(data)}: {type(error).__name__}: {text}", "repair it"
        ) from error


class _Writer:
    """Takes samples one after the other and keeps none of them in memory."""

    def __init__(self, make_file: Callable[[], IO[bytes]]) -> None:
        self.size = 0
        self._make_file = make_file
        self._pools: dict[str, IO[bytes]] = {}
        self._counts: dict[str, int] = {}
        self._forms: dict[str, int] = {}
        self._form = array("q")
        self._starts: list[array[int]] = []

    def add(self, sample: Any) -> None:
        """Append a sample.

        Raises:
            TypeError: it holds something that cannot be kept; the message is its type.
        """
        starts = list(self._counts.values())
        form = json.dumps(self._take(sample))
        self._form.append(self._forms.setdefault(form, len(self._forms)))
        self._starts.append(array("q", starts))
        self.size += 8 * (1 + len(starts))

    def _take(self, value: Any) -> Any:
        """Append the values in ``value`` to their pools; return its form."""
        kind = type(value)
        if value is None:
            return None
        if kind is bool:
            return self._put("bool", value, torch.bool)
        if kind is int and -(2**63) <= value < 2**63:
            return self._put("int", value, torch.int64)
        if kind is float:
            return self._put("float", value, torch.float64)
        if kind in (str, bytes):
            raw = value.encode("utf-8", "surrogatepass") if kind is str else value
            self._put("", len(raw), torch.int64)
            self._append(torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()))
            return kind.__name__
        if kind in (tuple, list):
            return {kind.__name__: [self._take(part) for part in value]}
        if isinstance(value, Mapping):
            return {"dict": [[_key(key), self._take(part)] for key, part in value.items()]}
        return self._take_tensor(value)

    def _put(self, form: str, value: Any, dtype: torch.dtype) -> str:
        self._append(torch.tensor([value], dtype=dtype))
        return form

    def _take_tensor(self, value: Any) -> Any:
        form = "tensor"
        if isinstance(value, (np.ndarray, np.generic)):
            form = "array" if isinstance(value, np.ndarray) else "scalar"
            native = np.asarray(value)  # raises TypeError below where its values are no numbers
            value = torch.from_numpy(native.astype(native.dtype.newbyteorder("="), order="C", copy=True))
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or _name(value) not in _CODES:
            what = f"{_name(value)} values" if isinstance(value, torch.Tensor) else ""
            raise TypeError(what or f"a value of type {type(value).__module__}.{type(value).__qualname__}")
        self._append(value.detach().cpu())
        return {form: [_name(value), list(value.shape)]}

    def _append(self, values: torch.Tensor) -> None:
        name = _name(values)
        if name not in self._pools:
            self._pools[name] = self._make_file()
        raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
        self._pools[name].write(raw)
        self._counts[name] = self._counts.get(name, 0) + values.numel()
        self.size += len(raw)

    def finish(self, path: Path) -> None:
        """Put the pools into one file."""
        names = list(self._pools)
        starts = np.zeros((len(self._form), len(names)), dtype=np.int64)
        for row, known in zip(starts, self._starts):
            row[: len(known)] = known
        tables = {_FORM: np.asarray(self._form, dtype=np.int64), _STARTS: starts}
        shapes = {name: ("I64", list(table.shape)) for name, table in tables.items()}
        shapes |= {f"pool.{name}": (_CODES[name], [self._counts[name]]) for name in names}
        contents = [table.tobytes() for table in tables.values()]
        with open(path, "wb") as out:
            out.write(_header(shapes, [*map(len, contents), *(pool.tell() for pool in self._pools.values())]))
            for content in contents:
                out.write(content)
            for pool in self._pools.values():
                pool.seek(0)
                while chunk := pool.read(1 << 20):
                    out.write(chunk)
        forms = [json.loads(form) for form in self._forms]
        document = {"samples": len(self._form), "pools": names, "forms": forms}
        path.with_suffix(".json").write_text(json.dumps(document), encoding="utf-8")


def _header(shapes: Mapping[str, tuple[str, list[int]]], sizes: list[int]) -> bytes:
    """The beginning of a safetensors file: the length of a JSON object, and the object."""
    entries, place = {}, 0
    for (name, (code, shape)), size in zip(shapes.items(), sizes, strict=True):
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise TypeError(f"a mapping with a key of type {type(key).__name__}")
    return key


def _name(values: Any) -> str:
    return str(getattr(values, "dtype", "")).removeprefix("torch.")


class SampleFile:
    """The data set that :func:`write_samples` wrote; every access gives a fresh copy.

    Raises:
        BadInput: the files are not of this form.
    """

    def __init__(self, path: Path) -> None:
        try:
            document = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            tensors = safetensors.torch.load_file(path)
            self._forms: list[Any] = document["forms"]
            self._names: list[str] = document["pools"]
            self._pools = {name: tensors[f"pool.{name}"] for name in self._names}
            self._form, self._starts = tensors[_FORM], tensors[_STARTS]
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise BadInput(f"{path}: not a file of samples ({error})", "start the run again") from None

    def __len__(self) -> int:
        return len(self._form)

    def __getitem__(self, index: int, /) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        places = dict(zip(self._names, self._starts[index].tolist()))
        return self._give(self._forms[int(self._form[index])], places)

    def _give(self, form: Any, places: dict[str, int]) -> Any:
        if form is None:
            return None
        if isinstance(form, str):
            return self._value(form, places)
        ((kind, parts),) = form.items()
        if kind == "dict":
            return {key: self._give(part, places) for key, part in parts}
        if kind in ("tuple", "list"):
            found = [self._give(part, places) for part in parts]
            return tuple(found) if kind == "tuple" else found
        dtype, shape = parts
        values = self._next(dtype, int(np.prod(shape, dtype=np.int64)), places).clone().reshape(shape)
        return values if kind == "tensor" else values.numpy() if kind == "array" else values.numpy()[()]

    def _value(self, form: str, places: dict[str, int]) -> Any:
        if form in ("str", "bytes"):
            length = int(self._next("int64", 1, places))
            raw = self._next("uint8", length, places).numpy().tobytes()
            return raw if form == "bytes" else raw.decode("utf-8", "surrogatepass")
        return self._next({"bool": "bool", "int": "int64", "float": "float64"}[form], 1, places).item()

    def _next(self, pool: str, count: int, places: dict[str, int]) -> torch.Tensor:
        start = places.get(pool, 0)
        places[pool] = start + count
        return self._pools[pool][start : start + count] if count else torch.empty(0, dtype=getattr(torch, pool))
