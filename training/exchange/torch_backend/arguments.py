"""Arguments of collectives: torch's options in all their overloads, and checks of tensors and roots.

An invalid call fails here, before anything is sent, with the wording of torch's own backends; the group stays usable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch

from training.exchange.torch_backend.work import BACKEND

Options = TypeVar("Options")
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


class InvalidArgument(ValueError, RuntimeError):
    """A collective cannot be carried out as called; torch's backends raise one or the other of the base types."""

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(f"{BACKEND}: {operation}: {problem}")


def options_of(kind: type[Options], positional: Sequence[Any], named: Mapping[str, Any]) -> Options:
    """Return a call's options. The arguments after the tensors are either an options object, or a root, a reduction and
    a timeout one by one, as in the overloads of :class:`torch.distributed.ProcessGroup`.

    Raises:
        TypeError: there is no such argument.
    """
    values = {name: value for name, value in named.items() if value is not None}
    for value in positional:
        if isinstance(value, bool) or value is None:
            continue
        is_root = isinstance(value, int) and "root" not in values
        values["root" if is_root else "timeout" if isinstance(value, timedelta) else _kind_of(value)] = value
    options: Any = values.pop("opts", None) or kind()
    for name, value in values.items():
        if name not in _FIELDS or not hasattr(options, _FIELDS[name]):
            raise TypeError(f"{BACKEND}: {kind.__name__} has no {name}")
        setattr(options, _FIELDS[name], value)
    return options  # type: ignore[no-any-return]  # of torch


def _kind_of(value: Any) -> str:
    return "opts" if type(value).__name__.endswith("Options") else "op"


def tensor_list(tensors: Any) -> list[torch.Tensor]:
    """Return the list of tensors that collectives take; a single tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def tensor_lists(tensors: Any) -> list[list[torch.Tensor]]:
    """Return the list of tensor lists that collectives take; a single list becomes a list of one."""
    values = list(tensors)
    return [values] if values and isinstance(values[0], torch.Tensor) else [list(value) for value in values]


def check_dense(*tensors: Sequence[torch.Tensor]) -> None:
    """
    Raises:
        NotImplementedError: a tensor is sparse.
    """
    for tensor in chain(*tensors):
        if tensor.layout != torch.strided:
            problem = f"takes dense tensors only, unsupported layout {tensor.layout}; use sparse=False, or to_dense()"
            raise NotImplementedError(f"{BACKEND} {problem}")


def check_writable(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """
    Raises:
        InvalidArgument: elements of a tensor share memory, so a result cannot be written into it.
    """
    for tensor in tensors:
        if tensor.numel() and any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride())):
            problem = f"elements of the {list(tensor.shape)} tensor share memory (expanded); pass tensor.contiguous()"
            raise InvalidArgument(operation, problem)


def check_root(operation: str, root: int, size: int) -> None:
    """
    Raises:
        InvalidArgument: no member has this rank.
    """
    if not 0 <= root < size:
        raise InvalidArgument(operation, f"invalid root rank: {root} of {size} members")


def check_root_tensor(operation: str, number: int, tensors: Sequence[torch.Tensor]) -> None:
    """
    Raises:
        InvalidArgument: the root has no tensor of this number.
    """
    if not 0 <= number < len(tensors):
        raise InvalidArgument(operation, f"invalid root tensor: {number} of {len(tensors)}")


def check_alike(operation: str, tensors: Sequence[torch.Tensor], reference: torch.Tensor, sizes: bool = True) -> None:
    """
    Raises:
        InvalidArgument: a tensor has another layout, type or, where ``sizes`` count, number of elements.
    """
    for number, tensor in enumerate(tensors):
        if tensor.layout != reference.layout:
            raise InvalidArgument(operation, f"invalid tensor layout at index {number}: {tensor.layout}")
        if tensor.dtype != reference.dtype:
            raise InvalidArgument(
                operation, f"invalid tensor type at index {number}: {tensor.dtype}, expected {reference.dtype}"
            )
        if sizes and tensor.numel() != reference.numel():
            raise InvalidArgument(
                operation,
                f"invalid tensor size at index {number}: {list(tensor.shape)}, expected {list(reference.shape)}",
            )


def check_single(operation: str, tensors: Sequence[torch.Tensor], which: str = "") -> torch.Tensor:
    """Return the only tensor.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    if len(tensors) != 1:
        raise InvalidArgument(operation, f"requires a single-element {which}tensor list, has {len(tensors)}")
    return tensors[0]


def check_of_members(
    operation: str, lists: Sequence[Sequence[torch.Tensor]], tensor: torch.Tensor, size: int, which: str
) -> None:
    """Check the root's argument of a gather or scatter: one list, with a tensor like ``tensor`` for each member.

    Raises:
        InvalidArgument: it is anything else.
    """
    if len(lists) != 1:
        raise InvalidArgument(operation, f"requires a single-element {which} list, has {len(lists)}")
    if len(lists[0]) != size:
        problem = f"Incorrect {which} list size {len(lists[0])}. {which.capitalize()} list size should be {size}"
        raise InvalidArgument(operation, f"{problem}, same as the number of members")
    check_alike(operation, lists[0], tensor)


def check_gathered(
    operation: str, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], rank: int, size: int
) -> None:
    """Check the lists of an all-gather; sizes may differ between members.

    Raises:
        InvalidArgument: a list is missing or too short, or a type or this member's own size does not match.
    """
    if not inputs:
        raise InvalidArgument(operation, "requires non-empty input tensor list")
    if len(outputs) != len(inputs):
        raise InvalidArgument(operation, "requires input/output tensor lists to have the same length")
    for number, (tensors, tensor) in enumerate(zip(outputs, inputs)):
        if len(tensors) != size:
            problem = f"invalid output tensor list at index {number}: {len(tensors)} tensors for {size} members"
            raise InvalidArgument(operation, problem)
        check_alike(operation, tensors, tensor, sizes=False)
        check_alike(operation, tensors[rank : rank + 1], tensor)


def check_gathered_coalesced(
    operation: str, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], size: int
) -> None:
    """Check the lists of a coalesced all-gather: one list for each member, with an output for each input.

    Raises:
        InvalidArgument: a list is missing or too short, or a tensor does not match.
    """
    if not inputs:
        raise InvalidArgument(operation, "requires non-empty input tensor list")
    if len(outputs) != size:
        raise InvalidArgument(operation, f"output lists should be equal to world size: {len(outputs)} for {size}")
    for tensors in outputs:
        if len(tensors) != len(inputs):
            raise InvalidArgument(operation, f"invalid output size: {len(tensors)} tensors for {len(inputs)} inputs")
        for number, (output, tensor) in enumerate(zip(tensors, inputs)):
            if output.numel() != tensor.numel():
                raise InvalidArgument(operation, f"invalid size of output tensor at index {number}")
            if output.dtype != tensor.dtype:
                raise InvalidArgument(operation, f"invalid tensor type at index {number}: {output.dtype}")


def check_scattered(
    operation: str, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], rank: int, size: int
) -> None:
    """Check the lists of a reduce-scatter, whose pieces may have different sizes.

    Raises:
        InvalidArgument: a list is missing or too short, or this member's piece does not match its output.
    """
    if not outputs or len(outputs) != len(inputs):
        raise InvalidArgument(operation, "requires non-empty input/output tensor lists of the same length")
    for number, (output, tensors) in enumerate(zip(outputs, inputs)):
        if len(tensors) != size:
            problem = f"invalid input tensor list at index {number}: {len(tensors)} tensors for {size} members"
            raise InvalidArgument(operation, problem)
        check_alike(operation, tensors, output, sizes=False)
        check_alike(operation, tensors[rank : rank + 1], output)


def flattened(outputs: Sequence[Sequence[torch.Tensor]]) -> Sequence[Any]:
    """Return the value of the future for such lists: the tensors themselves if there is only one list."""
    return outputs[0] if len(outputs) == 1 else outputs
