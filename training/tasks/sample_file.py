"""Serialise a map-style data set to a safetensors file, without pickle.

A sample may hold tensors, numpy arrays, numbers, booleans, texts, bytes and ``None`` in tuples, lists and mappings. The
values of all tensors of one type are concatenated to one flat tensor (a *pool*), in the order of the samples. A file of
JSON lines beside it has a line per sample with its other values, and the offsets of its tensors.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
import torch

from profiles.errors import BadInput, MusterError
from profiles.quantities import bytes_text
from training.tasks.base import SizedDataset

LARGEST = 2_000_000_000
"""Maximum size of a serialised data set in bytes."""
_SUPPORTED = "tensors, arrays, numbers, texts, bytes and None in tuples, lists and mappings"
_TYPES = frozenset("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool".split())


def write_samples(data: SizedDataset, path: Path, title: str, largest: int = LARGEST) -> None:
    """Write all samples: the tensors to ``path``, everything else beside it (``.json``).

    Raises:
        BadInput: a sample cannot be read or holds an unsupported type, or the data set is too large.
        OSError: a file cannot be written.
    """
    with ExitStack() as stack:
        writer = _Writer(lambda: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)))
        for number in range(len(data)):
            sample = _sample(data, number, title)
            try:
                writer.add(sample)
            except TypeError as error:
                raise BadInput(
                    f"{title}: sample {number} holds {error}, which is not sent to machines",
                    f"samples may hold {_SUPPORTED}; or give a module-level function that makes the data set there",
                ) from None
            if writer.size > largest:
                raise BadInput(
                    f"{title}: more than {bytes_text(largest)} after {number + 1} of {len(data)} samples",
                    "give a module-level function that makes the data set on each machine, from data that are there",
                )
        writer.finish(path)


def _sample(data: SizedDataset, number: int, title: str) -> Any:
    try:
        return data[number]
    except MusterError:
        raise
    except Exception as error:  # the user's own code may raise anything
        text = " ".join(str(error).split())
        raise BadInput(
            f"{title}: sample {number} of {len(data)}: {type(error).__name__}: {text}", "repair it"
        ) from error


class _Writer:
    """Writes samples one after the other without keeping them in memory."""

    def __init__(self, make_file: Callable[[], IO[bytes]]) -> None:
        self.size = 0
        self._make_file = make_file
        self._forms = make_file()
        self._pools: dict[str, IO[bytes]] = {}
        self._counts: dict[str, int] = {}

    def add(self, sample: Any) -> None:
        """Append a sample.

        Raises:
            TypeError: it holds an unsupported value; the message is its type.
        """
        line = json.dumps(self._form(sample)).encode() + b"\n"
        self._forms.write(line)
        self.size += len(line)

    def _form(self, value: Any) -> Any:
        """Append the tensors in ``value`` to their pools; return its JSON form with references to them."""
        kind = type(value)
        if kind in (bool, float, str, type(None)) or (kind is int and -(2**63) <= value < 2**63):
            return value
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is list:
            return [self._form(item) for item in value]
        if kind is tuple:
            return {"tuple": [self._form(item) for item in value]}
        if isinstance(value, Mapping):
            return {"dict": [[_key(key), self._form(item)] for key, item in value.items()]}
        return self._form_of_tensor(value)

    def _form_of_tensor(self, value: Any) -> dict[str, Any]:
        form = "tensor"
        if isinstance(value, (np.ndarray, np.generic)):
            form = "array" if isinstance(value, np.ndarray) else "scalar"
            native = np.asarray(value)  # raises TypeError below if its values are not numbers
            value = torch.from_numpy(native.astype(native.dtype.newbyteorder("="), order="C", copy=True))
        name = str(getattr(value, "dtype", "")).removeprefix("torch.")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or name not in _TYPES:
            description = f"{name} values" if isinstance(value, torch.Tensor) else ""
            raise TypeError(description or f"a value of type {type(value).__module__}.{type(value).__qualname__}")
        start, shape = self._counts.get(name, 0), list(value.shape)
        if value.numel():
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if name not in self._pools:
                self._pools[name] = self._make_file()
            self._pools[name].write(raw)
            self._counts[name] = start + value.numel()
            self.size += len(raw)
        return {form: [name, start, shape]}

    def finish(self, path: Path) -> None:
        """Write the pools into one file, and the lines into the other."""
        pools = {}
        for name, pool in self._pools.items():
            pool.flush()
            pools[name] = torch.from_numpy(np.memmap(pool, np.uint8, "r+")).view(getattr(torch, name))
        safetensors.torch.save_file(pools, path)
        self._forms.seek(0)
        with path.with_suffix(".json").open("wb") as out:
            shutil.copyfileobj(self._forms, out)


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise TypeError(f"a mapping with a key of type {type(key).__name__}")
    return key


class SampleFile:
    """Data set written by :func:`write_samples`; every access returns a fresh copy.

    Raises:
        BadInput: the files are not in this format.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._forms = path.with_suffix(".json").read_bytes().splitlines()
            self._pools = safetensors.torch.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise BadInput(f"{path}: not a file of samples ({error})", "start the run again") from None

    def __len__(self) -> int:
        return len(self._forms)

    def __getitem__(self, index: int, /) -> Any:
        return self._value(json.loads(self._forms[index]))

    def _value(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self._value(item) for item in form]
        if not isinstance(form, dict):
            return form
        ((kind, content),) = form.items()
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "tuple":
            return tuple(self._value(item) for item in content)
        if kind == "dict":
            return {key: self._value(item) for key, item in content}
        name, start, shape = content
        pool = self._pools.get(name, torch.empty(0, dtype=getattr(torch, name)))
        values = pool[start : start + math.prod(shape)].clone().reshape(shape)
        return values if kind == "tensor" else values.numpy() if kind == "array" else values.numpy()[()]
