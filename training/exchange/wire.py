"""Frames of the bulk stream: written, parsed, and checked before anything is kept.

Everything that can be wrong in a message raises :class:`WireError`; nothing here takes memory by a number that came
from the network.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from google.protobuf.message import DecodeError

from profiles.errors import BadInput
from training.exchange.codecs import CHUNK_ELEMENTS, Codec, codec_by_name
from training.exchange.hub_pb2 import (
    KIND_ANCHOR,
    KIND_FAILED,
    KIND_GATHER,
    KIND_MEAN,
    KIND_OPEN,
    BulkHeader,
    ControlUp,
    Status,
)

PROTOCOL_VERSION = 1
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 8192
MAX_MESSAGE_BYTES = CHUNK_BYTES + MAX_HEADER_BYTES + 64
MAX_GATHER_BYTES = 4 << 20
MAX_RANKS = 1024
_ALIGNMENT = 16
_LARGEST_WEIGHT = 1e18
EMPTY = memoryview(b"")
_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,128}")
_MACHINE_NAME = re.compile(r"[^\x00-\x1f\x7f]{0,128}")


class WireError(ValueError):
    """A message breaks the protocol; the text is one line for the log."""


@dataclass(frozen=True)
class HubLimits:
    """What one member may make the hub hold; all known before the run starts.

    Args:
        elements: elements of the longest vector of one mean.
        anchor_bytes: size of an anchor.
        member_bytes: contributions of one member that wait for the others.
        queued_bytes: results that one member has not fetched.
        kept_bytes: results of closed operations, for members that come late.
        open_operations: operations under way at once.
    """

    elements: int
    anchor_bytes: int
    member_bytes: int
    queued_bytes: int
    kept_bytes: int
    open_operations: int = 4096

    @classmethod
    def for_model(cls, elements: int) -> HubLimits:
        """Return the limits for a model of ``elements`` parameters: an anchor may hold weights, outer and optimizer
        state in fp32, and two whole vectors may be under way."""
        vector = 4 * elements + (1 << 20)
        slack = 16 << 20
        anchor = 5 * vector + slack
        return cls(elements, anchor, 2 * vector + slack, 2 * vector + anchor + slack, 2 * vector + slack)


@dataclass(frozen=True)
class Open:
    """First frame of a bulk stream."""

    rank: int
    session: int


@dataclass(frozen=True)
class MeanChunk:
    """One chunk of a vector: a contribution on its way up, a mean on its way down."""

    name: str
    codec: Codec
    elements: int
    """Of the whole vector."""
    chunk: int
    weight: float
    payload: memoryview
    contributors: tuple[int, ...] = ()
    members: tuple[int, ...] = ()

    @property
    def chunks(self) -> int:
        return max(1, -(-self.elements // CHUNK_ELEMENTS))

    @property
    def bounds(self) -> tuple[int, int]:
        """Start and stop of this chunk in the vector."""
        start = self.chunk * CHUNK_ELEMENTS
        return start, min(start + CHUNK_ELEMENTS, self.elements)

    def values(self) -> torch.Tensor:
        """Decode. Raises ``ValueError`` on impossible content."""
        start, stop = self.bounds
        return self.codec.decode(tensor_view(self.payload), stop - start)


@dataclass(frozen=True)
class BytesChunk:
    """One piece of a gathered payload or of an anchor (whose ``name`` is empty)."""

    name: str
    size: int
    """Bytes of the whole payload."""
    chunk: int
    payload: memoryview
    rank: int = 0
    """Whose payload it is; set by the hub."""
    members: tuple[int, ...] = ()
    contributors: tuple[int, ...] = ()

    @property
    def chunks(self) -> int:
        return max(1, -(-self.size // CHUNK_BYTES))


@dataclass(frozen=True)
class AnchorChunk(BytesChunk):
    """One piece of an anchor."""


@dataclass(frozen=True)
class Failed:
    """The named operation cannot finish."""

    name: str
    message: str


Frame = Open | MeanChunk | BytesChunk | AnchorChunk | Failed


def pack(header: BulkHeader, payload: memoryview | bytes = b"") -> bytes:
    """Return one frame."""
    head = header.SerializeToString()
    return b"".join((len(head).to_bytes(4, "little"), head, b"\0" * (-(4 + len(head)) % _ALIGNMENT), payload))


def pack_open(frame: Open) -> bytes:
    return pack(BulkHeader(kind=KIND_OPEN, rank=frame.rank, session=frame.session))


def pack_mean(frame: MeanChunk) -> bytes:
    header = BulkHeader(
        kind=KIND_MEAN,
        name=frame.name,
        codec=frame.codec.name,
        size=frame.elements,
        chunk=frame.chunk,
        weight=frame.weight,
        contributors=frame.contributors,
        members=frame.members,
    )
    return pack(header, frame.payload)


def pack_bytes(frame: BytesChunk) -> bytes:
    kind = KIND_ANCHOR if isinstance(frame, AnchorChunk) else KIND_GATHER
    header = BulkHeader(kind=kind, name=frame.name, size=frame.size, chunk=frame.chunk)
    header.rank = frame.rank
    header.members.extend(frame.members)
    header.contributors.extend(frame.contributors)
    return pack(header, frame.payload)


def pack_payload(frame: BytesChunk, data: bytes) -> Iterator[bytes]:
    """Yield the frames that carry ``data``; ``frame`` says all but size, chunk and payload."""
    view = memoryview(data)
    for chunk, start in enumerate(range(0, max(len(data), 1), CHUNK_BYTES)):
        yield pack_bytes(replace(frame, size=len(data), chunk=chunk, payload=view[start : start + CHUNK_BYTES]))


def pack_failed(frame: Failed) -> bytes:
    return pack(BulkHeader(kind=KIND_FAILED, name=frame.name, message=frame.message[:1024]))


def parse(message: bytes) -> Frame:
    """Parse and check one frame against the protocol itself (not against limits or the state of the group).

    Raises:
        WireError: anything about it is wrong.
    """
    header, payload = _split(message)
    _check(_ascending(header.contributors) and _ascending(header.members), "ranks are not ascending")
    if header.kind == KIND_MEAN:
        return _mean(header, payload)
    if header.kind in (KIND_GATHER, KIND_ANCHOR):
        return _bytes(header, payload)
    _check(len(payload) == 0, "payload where none belongs")
    if header.kind == KIND_OPEN:
        _check(header.rank < MAX_RANKS, "impossible rank")
        return Open(header.rank, header.session)
    if header.kind == KIND_FAILED:
        return Failed(_name(header), header.message)
    raise WireError("unknown kind of frame")


def parse_upload(message: bytes, limits: HubLimits) -> Frame:
    """Parse one frame that a member sent, and check it against the limits of the run too."""
    frame = parse(message)
    if isinstance(frame, MeanChunk):
        _check(frame.elements <= limits.elements, f"a vector of {frame.elements} elements is longer than the model")
        _check(frame.codec.name != "sparse", "a codec that only the hub sends")
    elif isinstance(frame, AnchorChunk):
        _check(frame.size <= limits.anchor_bytes, f"an anchor of {frame.size} bytes is too large")
    elif isinstance(frame, Failed):
        raise WireError("a kind of frame that only the hub sends")
    return frame


def parse_control(message: bytes) -> ControlUp:
    """Parse what a member sends on the control stream.

    Raises:
        WireError: not such a message, or too long.
    """
    _check(len(message) <= MAX_HEADER_BYTES, "a control message is too long")
    try:
        control: ControlUp = ControlUp.FromString(message)
    except DecodeError:
        raise WireError("a control message cannot be parsed") from None
    _check(control.WhichOneof("what") is not None, "an empty control message")
    _check(_MACHINE_NAME.fullmatch(control.hello.name) is not None, "impossible machine name")
    return control


def parse_status(message: bytes) -> Status:
    """Parse what the hub sends on the control stream. Raises :class:`WireError`."""
    try:
        status: Status = Status.FromString(message)
    except DecodeError:
        raise WireError("a status cannot be parsed") from None
    return status


def is_name(text: str) -> bool:
    """Return whether ``text`` can be the name of an operation: 1 to 128 letters, digits and ``._/:-``."""
    return _NAME.fullmatch(text) is not None


def tensor_view(payload: memoryview) -> torch.Tensor:
    """Return ``payload`` as a flat uint8 tensor over the same memory. It must never be written to."""
    if len(payload) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Readable(payload)))


class _Readable:
    """Shows read-only memory to numpy as writable, because torch warns of read-only memory on every call."""

    def __init__(self, payload: memoryview) -> None:
        self._keep = payload
        address = np.frombuffer(payload, dtype=np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (len(payload),), "typestr": "|u1", "data": (address, False), "version": 3}


def _split(message: bytes) -> tuple[BulkHeader, memoryview]:
    _check(4 <= len(message) <= MAX_MESSAGE_BYTES, f"a frame of {len(message)} bytes")
    length = int.from_bytes(message[:4], "little")
    start = -(-(4 + length) // _ALIGNMENT) * _ALIGNMENT
    _check(length <= MAX_HEADER_BYTES and start <= len(message), "the header is longer than the frame")
    try:
        header = BulkHeader.FromString(message[4 : 4 + length])
    except DecodeError:
        raise WireError("a header cannot be parsed") from None
    return header, memoryview(message)[start:]


def _mean(header: BulkHeader, payload: memoryview) -> MeanChunk:
    codec = _codec(header.codec)
    _check(math.isfinite(header.weight) and 0.0 <= header.weight <= _LARGEST_WEIGHT, "impossible weight")
    contributors, members = tuple(header.contributors), tuple(header.members)
    frame = MeanChunk(_name(header), codec, header.size, header.chunk, header.weight, payload, contributors, members)
    _check(frame.chunk < frame.chunks, "a chunk beyond the vector")
    start, stop = frame.bounds
    bound = codec.max_encoded_bytes(stop - start)
    exact = codec.name != "sparse"
    _check(len(payload) == bound if exact else len(payload) <= bound, f"{len(payload)} bytes where {bound} belong")
    return frame


def _bytes(header: BulkHeader, payload: memoryview) -> BytesChunk:
    _check(header.rank < MAX_RANKS, "impossible rank")
    kind, name = (AnchorChunk, "") if header.kind == KIND_ANCHOR else (BytesChunk, _name(header))
    members, contributors = tuple(header.members), tuple(header.contributors)
    frame = kind(name, header.size, header.chunk, payload, header.rank, members, contributors)
    too_large = kind is BytesChunk and frame.size > MAX_GATHER_BYTES
    _check(not too_large, f"a gathered payload of {frame.size} bytes is above 4 MiB")
    _check(frame.chunk < frame.chunks, "a chunk beyond the payload")
    expected = min(CHUNK_BYTES, frame.size - frame.chunk * CHUNK_BYTES)
    _check(len(payload) == expected, f"{len(payload)} bytes where {expected} belong")
    return frame


def _codec(name: str) -> Codec:
    _check(len(name) <= 32, "unknown codec")
    if name == "sparse":
        return codec_by_name("topk:1").reply
    try:
        return codec_by_name(name)
    except BadInput:
        raise WireError("unknown codec") from None


def _name(header: BulkHeader) -> str:
    _check(is_name(header.name), "impossible name of an operation")
    return header.name


def _ascending(ranks: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(ranks)) and (len(ranks) == 0 or ranks[-1] < MAX_RANKS)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise WireError(message)
