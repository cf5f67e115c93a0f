"""A member's contribution to a mean, copied, and the outcome of an operation in the form that is handed to others."""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from profiles.quantities import figure_text
from training.exchange.base import Contribution, ExchangeError, Group, MeanResult
from training.exchange.codecs import CHUNK_ELEMENTS, EncodedVector
from training.exchange.mean.reduction import BufferPool
from training.exchange.staging import fetch

OUTCOME = struct.Struct("<d")
"""Sum of the weights in a piece; bit masks of the contributing and the refused ranks follow, then the flags."""
_MAX_NAME = 40


def copy_contribution(contribution: Contribution, buffer_pool: BufferPool, borrows: bool = False) -> Contribution:
    """Return a checked contribution whose values are copied to the CPU, encoded where a device can do that, and belong
    to the operation alone; those of the CPU are the caller's if it ``borrows`` them."""
    values, codec = contribution.values, contribution.codec
    if contribution.vector is not None:
        return contribution
    if values.device.type != "cpu":
        fetched = fetch(values, codec)
        if isinstance(fetched, EncodedVector):
            return replace(contribution, values=torch.empty(0), vector=fetched)
        return replace(contribution, values=fetched).checked()
    if borrows:
        return replace(contribution, values=values.detach(), is_borrowed=True).checked()
    values_copy, finite = float_buffer(buffer_pool, values.numel()), True
    for start in range(0, values.numel(), CHUNK_ELEMENTS):  # copy and check while they are in the cache
        chunk = values_copy[start : start + CHUNK_ELEMENTS].copy_(values.detach()[start : start + CHUNK_ELEMENTS])
        finite = finite and codec.carries(chunk)
    return replace(contribution, values=values_copy).checked(finite)


def encoded_piece(contribution: Contribution, start: int, stop: int) -> torch.Tensor:
    """Return the bytes of a piece, which begins at a multiple of the codec's block; they may be the contribution's."""
    if contribution.vector is not None:
        return contribution.vector.read(start, stop)
    return contribution.codec.encode(contribution.values[start:stop])


def describe_operation(kind: str, name: str, contribution: Contribution | None = None) -> str:
    """Describe an operation: the same text on all its members, unless they are at different ones."""
    short = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}... {zlib.crc32(name.encode()):08x}"
    if contribution is None:
        return f"the {kind} '{short}'"
    flags = f" with {len(contribution.flags)} bytes of flags" if contribution.flags else ""
    return f"the {kind} '{short}' of {contribution.elements} numbers as {contribution.codec.name}{flags}"


def description_crc(description: str) -> int:
    """Return the number that travels with an operation's data in place of its description."""
    return zlib.crc32(description.encode())


@dataclass(frozen=True)
class OperationResult:
    """The result of an operation as it arrived: the same bytes on all members, so any of them can hand it to
    another."""

    members: tuple[int, ...]
    pieces: tuple[tuple[int, int, memoryview], ...]
    """Of a mean: start, stop and message of every piece. Of a gather: the rank twice, and its payload."""
    group: Group = ()
    """The group whose operation it was, lost members included."""

    @functools.cached_property
    def size(self) -> int:
        """Total bytes of its pieces."""
        return sum(len(data) for *_, data in self.pieces)

    def to_bytes(self) -> bytes:
        """Serialise it, to be handed over."""
        head = {
            "members": self.members,
            "group": self.group,
            "parts": [[start, stop, len(data)] for start, stop, data in self.pieces],
        }
        return b"".join((json.dumps(head).encode(), b"\n", *(data for *_, data in self.pieces)))

    @classmethod
    def from_bytes(cls, data: bytearray) -> OperationResult:
        """Parse what :meth:`to_bytes` wrote.

        Raises:
            ExchangeError: it is invalid.
        """
        try:
            end = data.index(b"\n")
            head = json.loads(data[:end])
            members = tuple(int(rank) for rank in head["members"])
            group = tuple(int(rank) for rank in head.get("group", ()))
            bounds = [(int(start), int(stop), int(size)) for start, stop, size in head["parts"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ExchangeError(f"a result that was handed over cannot be read: {error}") from error
        if not members or list(members) != sorted(set(members)) or members[0] < 0:
            raise ExchangeError("a result that was handed over cannot be read: it names no valid members")
        sizes = [size for *_, size in bounds]
        if min(sizes, default=0) < 0 or end + 1 + sum(sizes) != len(data):
            raise ExchangeError("a result that was handed over cannot be read: its parts do not fit its size")
        starts = itertools.accumulate(sizes, initial=end + 1)
        view = memoryview(data)
        pieces = tuple((a, b, view[at : at + size]) for (a, b, size), at in zip(bounds, starts))
        return cls(members, pieces, group)


def apply_outcome(
    contribution: Contribution,
    rank: int,
    outcome: OperationResult,
    decode: bool = True,
    into: EncodedVector | None = None,
) -> MeanResult:
    """Write the outcome of a mean over the contribution's values, and return the result for member ``rank``.

    Args:
        decode: ``False`` if the values are decoded already.
        into: takes the outcome as it is encoded, in place of the values.

    Raises:
        ExchangeError: the outcome does not belong to such a contribution.
    """
    weight, flags, refused, left_out, at = 0.0, b"", set[int](), list[tuple[int, int]](), 0
    mask = -(-len(outcome.members) // 8)
    for number, (start, stop, message) in enumerate(outcome.pieces):
        split = len(message) - OUTCOME.size - 2 * mask - len(contribution.flags)
        if split < 0 or start != at or not start <= stop <= contribution.elements:
            raise ExchangeError(f"the outcome of '{contribution.name}' is not one of {contribution.elements} values")
        if stop > start and (decode or into is not None):
            decode_outcome(contribution, message[:split], start, stop, contribution.values if into is None else into)
        masks = bytes(message[split + OUTCOME.size :])
        refused |= _ranks(outcome.members, masks[mask : 2 * mask])
        if rank not in _ranks(outcome.members, masks[:mask]) and stop > start:
            left_out.append((start, stop))
        if not number:
            weight, flags = OUTCOME.unpack_from(message, split)[0], masks[2 * mask :]
            if not 0.0 <= weight < math.inf:
                raise ExchangeError(f"the outcome of '{contribution.name}' has the weight {figure_text(weight)}")
        at = stop
    if at != contribution.elements or not outcome.pieces:
        raise ExchangeError(f"the outcome of '{contribution.name}' has {at} of {contribution.elements} values")
    return MeanResult(
        contribution.values,
        weight,
        outcome.members,
        tuple(left_out),
        tuple(sorted(refused)),
        flags,
        contribution.is_finite,
    )


def outcome_tail(
    weight: float, members: Sequence[int], contributors: Sequence[int], refused: Sequence[int], flags: bytes
) -> bytes:
    """Return what follows the values of an outcome, as :func:`apply_outcome` reads it."""
    masks = (sum(1 << members.index(rank) for rank in ranks) for ranks in (contributors, refused))
    return OUTCOME.pack(weight) + b"".join(mask.to_bytes(-(-len(members) // 8), "little") for mask in masks) + flags


def decode_outcome(
    contribution: Contribution, data: memoryview, start: int, stop: int, into: torch.Tensor | EncodedVector
) -> None:
    """Write what an owner sent for a piece into a vector: decoded, unless that is encoded itself.

    Raises:
        ExchangeError: it is invalid.
    """
    try:
        if isinstance(into, torch.Tensor):
            contribution.codec.reply.decode_into(as_tensor(data), into[start:stop])
        else:
            into.write(start, stop, as_tensor(data))
    except (ValueError, RuntimeError, IndexError) as error:
        raise ExchangeError(f"the outcome of '{contribution.name}' cannot be decoded: {error}") from error


def float_buffer(buffer_pool: BufferPool, elements: int) -> torch.Tensor:
    """Return a buffer for so many fp32 numbers."""
    return torch.frombuffer(buffer_pool.take(4 * elements), dtype=torch.float32) if elements else torch.empty(0)


def gather_buffer(size: int) -> memoryview:
    """Return a buffer for a member's message; its pages are allocated as they are filled, for most payloads are
    short."""
    data: memoryview = torch.empty(size, dtype=torch.uint8).numpy().data
    return data


def _ranks(members: Sequence[int], mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return set(itertools.compress(members, (bits >> index & 1 for index in range(len(members)))))


def as_tensor(data: memoryview) -> torch.Tensor:
    """Return a flat uint8 tensor that shares the memory of ``data``."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
