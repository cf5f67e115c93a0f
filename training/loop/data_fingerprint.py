"""Checks that all members hold the same data (lengths, tables and a few samples of every split) and frozen weights.

Members may run different systems, whose decoders and vector units round differently. So texts and integers are compared
by hash, and measured or decoded values by mean, spread and a projection, which detect another sample but tolerate
differences in the last digits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from profiles.errors import BadInput, NothingToResume, counted
from training.data.batches import Samples
from training.exchange.base import Exchange
from training.tasks.base import Task
from training.tasks.own_code.source_hash import changed_parts
from training.tasks.own_code.streams import Stream

LOOKS = 8
"""Number of samples of a split that are compared."""
_LEAVES = 64
"""Number of values of one sample that are compared."""
_NUMBERS = 1 << 16
"""Number of elements of one value that are compared."""
_FROZEN = 1 << 10
"""Number of elements of one frozen weight that are compared."""
_ROUNDING = "figures differ by rounding; for one precision set mixed_precision to off or bf16"
_SAME = "give every machine the same data set in the same order, and the same model"
BROUGHT_BACK = "bring back the data that were there, or start a new run"
_CHANGES = "changes"
"""Instead of a look: the sample differs whenever it is read."""

Leaf = str | tuple[str, float, float, float]
"""A hash; or shape, mean, spread and projection."""
Look = str | dict[str, Leaf]
"""The leaves of a sample by path; or the name of the error that reading it raises."""


class SplitDescription(BaseModel):
    """Fingerprint of one split."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    samples: int
    table: str
    looks: dict[str, Look]


class Description(BaseModel):
    """Fingerprint of a task's data, and of those parts of its model that training does not make equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    splits: dict[str, SplitDescription]
    shapes: str
    """Hash of the parameters' names and shapes."""
    frozen: Leaf
    """Fingerprint of the frozen weights. Like the hash it is of the whole model, however many devices hold it."""
    precision: str = ""
    """Precision of the steps. It may differ between members: their gradients are of the same loss."""
    parts: str = ""
    """Hash of the members' partitions, if the data are split."""
    code: dict[str, str] = {}
    """Hashes of the source of the user's functions, see :attr:`training.tasks.base.Task.code`; not compared."""

    def without_samples(self) -> Description:
        """Return the fingerprint of the model alone, for data that stay on their machines."""
        return self.model_copy(update={"splits": {}})

    @property
    def tables(self) -> dict[str, str]:
        """Hash of each split's table, patches applied, where it has one."""
        return {name: split.table for name, split in self.splits.items() if split.table}


def describe(
    task: Task,
    weights: Iterable[tuple[str, torch.Tensor]],
    samples: Samples,
    seed: int,
    warn: Callable[[str], None],
    precision: str = "",
    split_fingerprint: str = "",
    gather: Callable[[bytes], list[bytes]] = lambda payload: [payload],
) -> Description:
    """Return the fingerprint of a task's data and its model.

    Args:
        weights: see :meth:`training.layouts.base.Layout.weights`.
        gather: asks the member's devices, see :meth:`training.layouts.base.Layout.gather`: each holds a part of the
            model.
    """
    descriptions: dict[str, SplitDescription] = {}
    for split in ["train", *sorted(task.evaluation)]:
        data = task.train if split == "train" else task.evaluation[split]
        size = (data.length or 0) if isinstance(data, Stream) else len(data)
        chosen = np.random.default_rng([seed, size]).choice(size, min(size, LOOKS), replace=False).tolist()
        if isinstance(data, Stream):  # the others come later
            chosen = [0]
        looks = {str(index): _stable_look(task, samples, split, index) for index in sorted(chosen)}
        if _CHANGES in looks.values():
            warn(
                f"samples of {split} differ whenever they are read, though torch, numpy and random are seeded; "
                "the run cannot be repeated exactly: draw from these three, not from a generator of the data set's own"
            )
        descriptions[split] = SplitDescription(samples=size, table=task.table(split), looks=looks)
    shapes, frozen = _whole_model(weights, gather)
    parts, code = split_fingerprint, dict(task.code)
    return Description(splits=descriptions, shapes=shapes, frozen=frozen, precision=precision, parts=parts, code=code)


def _whole_model(
    weights: Iterable[tuple[str, torch.Tensor]], gather: Callable[[bytes], list[bytes]]
) -> tuple[str, Leaf]:
    """Return the hash of all parameters' names and shapes, and the fingerprint of the frozen ones."""
    mine = {name: (list(p.shape), [] if p.requires_grad else _frozen_look(p)) for name, p in weights}
    whole: dict[str, Any] = {}
    for part in gather(json.dumps(mine).encode()):
        whole |= json.loads(part)
    looks = [look for _, (_, look) in sorted(whole.items()) if look]
    shapes = json.dumps(sorted((name, shape) for name, (shape, _) in whole.items()))
    return _digest(shapes.encode()), _pooled(np.array(looks)) if looks else ""


def _frozen_look(parameter: torch.Tensor) -> tuple[float, ...]:
    """Return the number of elements that are compared, and their statistics."""
    flat = parameter.detach().reshape(-1)[:_FROZEN].float().cpu().numpy()
    return flat.size, *_statistics(np.nan_to_num(flat))


def _pooled(looks: np.ndarray[Any, Any]) -> Leaf:
    """Return the statistics of all weights together, from those of each."""
    sizes, means, spreads, projections = looks.T
    mean = float(np.average(means, weights=sizes))
    square = float(np.average(spreads**2 + means**2, weights=sizes))
    projection = float(projections.sum() / math.sqrt(len(looks)))
    return str(int(sizes.sum())), mean, math.sqrt(max(0.0, square - mean**2)), projection


def check_same(
    mine: Description, exchange: Exchange, names: Callable[[int], str], warn: Callable[[str], None] = lambda text: None
) -> None:
    """Compare the data of all members; the first member warns if they do not all compute in one precision.

    Raises:
        BadInput: they differ; the message names a member that differs from the majority. The same on every member.
    """
    if exchange.engine == "solo":
        return
    payloads = exchange.gather("start/data", mine.model_dump_json().encode())
    _compare(payloads, names, warn if exchange.rank == min(payloads) else lambda text: None)


def check_devices(
    mine: Description, gather: Callable[[bytes], list[bytes]], names: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Compare the data that the devices of one member read.

    Args:
        gather: see :meth:`training.layouts.base.Layout.gather`.

    Raises:
        BadInput: see :func:`check_same`.
    """
    if len(names) == 1:
        return
    _compare(dict(enumerate(gather(mine.model_dump_json().encode()))), names.__getitem__, warn)


def _compare(payloads: Mapping[int, bytes], names: Callable[[int], str], warn: Callable[[str], None]) -> None:
    parsed = {payload: _read(payload) for payload in payloads.values()}  # few, however many members: mostly one
    held = Counter(payloads.values())
    alike = {a: [b for b in parsed if not describe_difference(parsed[a], parsed[b])] for a in parsed}
    majority = max(payloads, key=lambda rank: (sum(held[kind] for kind in alike[payloads[rank]]), -rank))
    for rank in sorted(payloads):
        if payloads[rank] not in alike[payloads[majority]]:
            deviation = describe_difference(parsed[payloads[majority]], parsed[payloads[rank]])
            raise BadInput(f"{names(rank)} has other data or another model than {names(majority)}: {deviation}", _SAME)
    descriptions = {rank: parsed[payloads[rank]] for rank in sorted(payloads)}
    used = {names(rank): report.precision[:20] for rank, report in descriptions.items() if report and report.precision}
    if len(set(used.values())) > 1:
        warn(f"{', '.join(f'{name} computes in {kind}' for name, kind in used.items())}: {_ROUNDING}")


def _read(payload: bytes) -> Description | None:
    try:
        return Description.model_validate_json(payload)
    except ValidationError:
        return None


def check_unchanged(recorded: Any, mine: Description, whose: str, owner: str = "") -> None:
    """Compare with the description in a snapshot, or with that of the members that train already.

    Args:
        recorded: the other description, as JSON.
        whose: names it in the message: "the others have".
        owner: name of this machine, if it has its own data.

    Raises:
        BadInput: they differ.
    """
    try:
        before = Description.model_validate(recorded)
    except ValidationError as error:
        raise NothingToResume("what the run recorded of its data cannot be read") from error
    if changes := describe_difference(before, mine):
        hint = BROUGHT_BACK if owner else _SAME
        raise BadInput(f"{owner or 'this machine'} has other data or another model than {whose}: {changes}", hint)


def change_warnings(recorded: Any, mine: Description) -> Iterator[str]:
    """Yield what earlier steps were computed with, and the steps from here on are not: precision and code."""
    before = str(recorded["precision"])[:20]
    if before != mine.precision:
        yield f"this machine computed in {before} before and computes in {mine.precision} now: {_ROUNDING}"
    if changed := changed_parts(Description.model_validate(recorded).code, mine.code):
        verb = "is" if len(changed) == 1 else "are"
        old = f"the source of {', '.join(changed)} {verb} not what the run was trained with"
        yield f"{old}; it goes on with the new one"


def describe_difference(expected: Description | None, actual: Description | None) -> str:
    """Return in words how ``actual`` differs from ``expected``; empty: not at all. ``None``: an unreadable report."""
    if expected is None or actual is None:
        return "" if expected is actual else "its report of its data cannot be read"
    if expected.splits.keys() != actual.splits.keys():
        return f"splits {', '.join(actual.splits)[:200]} instead of {', '.join(expected.splits)[:200]}"
    for split, a in expected.splits.items():
        b = actual.splits[split]
        if a.samples != b.samples:
            return f"{split} has {counted(b.samples, 'sample')} instead of {a.samples}"
        for index in a.looks:
            if not _alike(a.looks[index], b.looks.get(index, "")):
                return f"sample {index} of {split} is different"
        if a.table != b.table and a.table.partition("+")[0] == b.table.partition("+")[0]:
            return "the teacher is different"
        if a.table != b.table:
            return f"the table of {split} has different lines or another order"
    if expected.parts != actual.parts:
        return "labels or speakers of the training samples, by which they are split, are different"
    if expected.shapes != actual.shapes:
        return "the model's layers or their sizes are different"
    return "" if _leaf_alike(expected.frozen, actual.frozen) else "the model's frozen weights are different"


def _stable_look(task: Task, samples: Samples, split: str, index: int) -> Look:
    first_look, second_look = (
        samples.probe(split, index, lambda sample: _look(task.identity(sample))) for _ in range(2)
    )
    return first_look if _alike(first_look, second_look) else _CHANGES


def _look(sample: Any) -> Look:
    return {path: _seen(value) for path, value in itertools.islice(_leaves(sample, ""), _LEAVES)}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a sample with their paths."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and not all(type(item) in (int, float, bool) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}.{number}")
    else:
        yield path, value


def _seen(value: Any) -> Leaf:
    """Return the hash of a value, or its statistics if it may be rounded."""
    if isinstance(value, (str, bytes)):
        return _digest(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if array.dtype.kind not in "biufc":
        return type(value).__name__
    shape = "x".join(map(str, array.shape))
    flat = array.reshape(-1)[:: max(1, array.size // _NUMBERS)]
    if array.dtype.kind in "fc" or (array.dtype.itemsize < 4 and array.dtype.kind != "b"):
        return (shape, *_statistics(np.nan_to_num(np.abs(flat) if array.dtype.kind == "c" else flat)))
    return f"{shape} {_digest(flat.astype(np.int64).tobytes())}"


def _statistics(flat: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Return mean, spread, and the projection of the standardised numbers on fixed signs."""
    if not flat.size:
        return 0.0, 0.0, 0.0
    numbers = np.clip(flat.astype(np.float64), -1e100, 1e100)
    mean, spread = float(numbers.mean()), float(numbers.std())
    signs = np.random.default_rng(0).integers(0, 2, numbers.size) * 2 - 1
    standard = (numbers - mean) / spread if spread > 0 else np.zeros_like(numbers)
    return mean, spread, float((standard * signs).sum() / math.sqrt(numbers.size))


def _alike(expected: Look, actual: Look) -> bool:
    if isinstance(expected, str) or isinstance(actual, str):
        return expected == actual or _CHANGES in (expected, actual)
    return expected.keys() == actual.keys() and all(_leaf_alike(expected[path], actual[path]) for path in expected)


def _leaf_alike(expected: Leaf, actual: Leaf) -> bool:
    if isinstance(expected, str) or isinstance(actual, str):
        return expected == actual
    (shape, mean, spread, sign), (other_shape, other_mean, other_spread, other_sign) = expected, actual
    tolerance = 0.02 * max(spread, other_spread) + 1e-4 * max(abs(mean), abs(other_mean)) + 1e-12
    is_near = (
        abs(mean - other_mean) <= tolerance
        and abs(spread - other_spread) <= tolerance
        and abs(sign - other_sign) <= 0.1
    )
    return is_near and shape == other_shape


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
