"""Frames of the bulk stream: written, parsed, and checked before anything is kept.

Everything that can be wrong in a message raises :class:`WireError`; nothing here takes memory by a number that came
from the network.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from google.protobuf.message import DecodeError

from profiles.errors import BadInput
from training.exchange.base import MAX_FLAGS
from training.exchange.codecs import CHUNK_ELEMENTS, Codec, codec_by_name
from training.exchange.hub_pb2 import (
    KIND_ANCHOR,
    KIND_FAILED,
    KIND_GATHER,
    KIND_MEAN,
    KIND_MODEL,
    KIND_OPEN,
    KIND_RESIDUAL,
    BulkHeader,
    ControlUp,
    Status,
)

PROTOCOL_VERSION = 2
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 8192
MAX_MESSAGE_BYTES = CHUNK_BYTES + MAX_HEADER_BYTES + 64
MAX_GATHER_BYTES = 4 << 20
MAX_RANKS = 1024
_ALIGNMENT = 16
LARGEST_WEIGHT = 1e18
_MOST_ELEMENTS = 1 << 40
EMPTY = memoryview(b"")
_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,128}")
_MACHINE_NAME = re.compile(r"[^\x00-\x1f\x7f]{0,128}")


class WireError(ValueError):
    """A message breaks the protocol; the text is one line for the log."""


@dataclass(frozen=True)
class HubLimits:
    """What one member may make the hub hold: some copies of the model, whatever the member does.

    Args:
        elements: elements of the longest vector of one mean.
        anchor_bytes: size of an anchor.
        member_bytes: contributions of one member that wait for the others.
        queued_bytes: results that one member has not fetched; a newcomer may have an anchor waiting besides.
        kept_bytes: results of closed operations, for members that come late.
        open_operations: operations of one member under way at once.
    """

    elements: int
    anchor_bytes: int
    member_bytes: int
    queued_bytes: int
    kept_bytes: int
    open_operations: int = 4096

    @classmethod
    def for_model(cls, elements: int, members: int = 8) -> HubLimits:
        """Return the limits for a longest vector of ``elements``: two of them may be under way, and an anchor may hold
        weights, optimizer, outer and best state and error feedback in fp32."""
        vector = 4 * elements + (1 << 20)
        slack = 16 << 20
        queued = 2 * vector + slack + members * MAX_GATHER_BYTES
        return cls(elements, 8 * vector + slack, 2 * vector + slack, queued, 2 * vector + slack)


@dataclass(frozen=True)
class Open:
    """First frame of a bulk stream."""

    rank: int
    session: int


@dataclass(frozen=True)
class Model:
    """What a member says of its model before its first operation."""

    elements: int
    """Of the longest vector that it will exchange."""


class _VectorChunk:
    """One chunk of a vector."""

    elements: int
    """Of the whole vector."""
    chunk: int

    @property
    def chunks(self) -> int:
        return max(1, -(-self.elements // CHUNK_ELEMENTS))

    @property
    def bounds(self) -> tuple[int, int]:
        """Start and stop of this chunk in the vector."""
        start = self.chunk * CHUNK_ELEMENTS
        return start, min(start + CHUNK_ELEMENTS, self.elements)


@dataclass(frozen=True)
class MeanChunk(_VectorChunk):
    """A contribution on its way up, a mean on its way down."""

    name: str
    codec: Codec
    elements: int
    chunk: int
    weight: float
    payload: memoryview
    contributors: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    """Ranks whose values are not finite; of a contribution: not empty if its sender's are not."""
    flags: bytes = b""
    """Of the first chunk."""
    stream: str = ""

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
class ResidualChunk(_VectorChunk):
    """What encoding the means of a stream has lost: asked for, told, or given back."""

    name: str
    stream: str
    elements: int
    chunk: int
    payload: memoryview = EMPTY
    """fp32; empty to ask, and where nothing is lost."""


@dataclass(frozen=True)
class Failed:
    """The named operation cannot finish."""

    name: str
    message: str


Frame = Open | Model | MeanChunk | BytesChunk | AnchorChunk | ResidualChunk | Failed
_OVERHEAD = 512


def held_bytes(payload: memoryview) -> int:
    """Return how much memory a payload keeps: the whole message that it is a part of, its padding too."""
    whole = payload.obj
    return _OVERHEAD + (len(whole) if isinstance(whole, bytes) else len(payload))


def framed(header: BulkHeader, payload: memoryview | bytes = b"") -> bytes:
    """Return a header and its payload as one message."""
    head = header.SerializeToString()
    return b"".join((len(head).to_bytes(4, "little"), head, b"\0" * (-(4 + len(head)) % _ALIGNMENT), payload))


def pack(frame: Frame) -> bytes:
    """Return one frame as a message."""
    match frame:
        case Open():
            return framed(BulkHeader(kind=KIND_OPEN, rank=frame.rank, session=frame.session))
        case Model():
            return framed(BulkHeader(kind=KIND_MODEL, size=frame.elements))
        case Failed():
            return framed(BulkHeader(kind=KIND_FAILED, name=frame.name, message=frame.message[:1024]))
        case MeanChunk():
            header = BulkHeader(
                kind=KIND_MEAN,
                codec=frame.codec.name,
                size=frame.elements,
                weight=frame.weight,
                contributors=frame.contributors,
                members=frame.members,
                refused=frame.refused,
                flags=frame.flags,
                stream=frame.stream,
            )
        case ResidualChunk():
            header = BulkHeader(kind=KIND_RESIDUAL, stream=frame.stream, size=frame.elements)
        case BytesChunk():
            kind = KIND_ANCHOR if isinstance(frame, AnchorChunk) else KIND_GATHER
            header = BulkHeader(
                kind=kind, size=frame.size, rank=frame.rank, members=frame.members, contributors=frame.contributors
            )
    header.name, header.chunk = frame.name, frame.chunk
    return framed(header, frame.payload)


def pack_payload(frame: BytesChunk, data: bytes) -> Iterator[bytes]:
    """Yield the frames that carry ``data``; ``frame`` says all but size, chunk and payload."""
    view = memoryview(data)
    for chunk, start in enumerate(range(0, max(len(data), 1), CHUNK_BYTES)):
        yield pack(replace(frame, size=len(data), chunk=chunk, payload=view[start : start + CHUNK_BYTES]))


def parse(message: bytes) -> Frame:
    """Parse and check one frame against the protocol itself (not against limits or the state of the group).

    Raises:
        WireError: anything about it is wrong.
    """
    header, payload = _split(message)
    for ranks in (header.contributors, header.members, header.refused):
        ascending = all(a < b for a, b in itertools.pairwise(ranks)) and (not ranks or ranks[-1] < MAX_RANKS)
        _check(ascending, "ranks are not ascending")
    if header.kind == KIND_MEAN:
        return _mean(header, payload)
    if header.kind in (KIND_GATHER, KIND_ANCHOR):
        return _bytes(header, payload)
    if header.kind == KIND_RESIDUAL:
        return _residual(header, payload)
    _check(len(payload) == 0, "payload where none belongs")
    if header.kind == KIND_OPEN:
        _check(header.rank < MAX_RANKS, "impossible rank")
        return Open(header.rank, header.session)
    if header.kind == KIND_MODEL:
        _check(header.size < _MOST_ELEMENTS, "a model beyond all bounds")
        return Model(header.size)
    if header.kind == KIND_FAILED:
        return Failed(_name(header), header.message)
    raise WireError("unknown kind of frame")


def parse_upload(message: bytes, limits: HubLimits) -> Frame:
    """Parse one frame that a member sent, and check it against the limits of the run too."""
    frame = parse(message)
    if isinstance(frame, MeanChunk):
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
    _check(math.isfinite(header.weight) and 0.0 <= header.weight <= LARGEST_WEIGHT, "impossible weight")
    contributors, members = tuple(header.contributors), tuple(header.members)
    frame = MeanChunk(
        _name(header), codec, header.size, header.chunk, header.weight, payload, contributors, members,
        tuple(header.refused), header.flags, header.stream,
    )  # fmt: skip
    _check(frame.chunk < frame.chunks, "a chunk beyond the vector")
    _check(len(frame.flags) <= (0 if frame.chunk else MAX_FLAGS), "flags where they do not belong")
    _check(not frame.stream or is_name(frame.stream), "impossible name of a stream")
    start, stop = frame.bounds
    bound = codec.max_encoded_bytes(stop - start)
    exact = codec.name != "sparse"
    _check(len(payload) == bound if exact else len(payload) <= bound, f"{len(payload)} bytes where {bound} belong")
    return frame


def _residual(header: BulkHeader, payload: memoryview) -> ResidualChunk:
    _check(is_name(header.stream), "impossible name of a stream")
    frame = ResidualChunk(_name(header), header.stream, header.size, header.chunk, payload)
    start, stop = frame.bounds
    _check(start <= max(stop - 1, 0), "a chunk beyond the vector")
    _check(len(payload) in (0, 4 * (stop - start)), f"{len(payload)} bytes where {4 * (stop - start)} belong")
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


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise WireError(message)


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
