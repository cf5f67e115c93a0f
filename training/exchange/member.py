"""A member's end of the hub engine."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch

from training.exchange import transport, wire
from training.exchange.base import (
    ANCHOR_DEADLINE,
    Anchor,
    Exchange,
    ExchangeError,
    ExchangeTimeout,
    MeanResult,
    Pending,
    Traffic,
)
from training.exchange.codecs import Codec
from training.exchange.hub_pb2 import ControlUp, Goodbye, Heartbeat, Hello, Status
from training.exchange.operations import (
    GatherOperation,
    HubOperation,
    MeanOperation,
    Meter,
    ResidualOperation,
    deliver,
    residual_frames,
)
from training.exchange.payloads import anchor_from_bytes, anchor_to_bytes
from training.exchange.wire import AnchorChunk, Failed, WireError

Started = TypeVar("Started", MeanOperation, GatherOperation, ResidualOperation)
HEARTBEAT = 1.0
LEASE = 5.0
_RETRY = 0.2
_GOODBYE_WITHIN = 2.0


class HubMember(Exchange):
    """One member, connected to the hub by a control and a bulk stream, each on a TCP connection of its own.

    Args:
        address: ``host:port`` of the hub, a literal address.
        certificates: folder of this member's certificates; ``None`` for traffic in clear on loopback.
        local: the hub is on this machine, see :class:`training.plan.MemberPlan`.
    """

    engine = "hub"

    def __init__(
        self,
        address: str,
        certificates: Path | None,
        run_id: str,
        rank: int,
        world_size: int,
        name: str,
        local: bool = False,
    ) -> None:
        self.rank = rank
        self._address = address
        self._certificates = certificates
        self._hello = Hello(version=wire.PROTOCOL_VERSION, run_id=run_id, rank=rank, world_size=world_size, name=name)
        self._meter = Meter()
        self.traffic: Traffic = self._meter.traffic
        self._changed = threading.Condition()
        self._status: Status | None = None
        self._ended = ""
        self._refused = False
        self._members: tuple[int, ...] = (rank,)
        self._newcomer = False
        self._publishing = False
        self._anchor: Anchor | None = None
        self._anchor_pieces: list[memoryview] = []
        self._operations: dict[str, HubOperation[Any]] = {}
        self._uploads: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self._uploading_ended = threading.Event()
        self._words: queue.SimpleQueue[ControlUp | None] = queue.SimpleQueue()
        self._silent_beats = 0
        self._local = local
        self._channels: list[Any] = []
        self._readers: list[threading.Thread] = []
        # A thread that is still inside C++ when the interpreter goes would abort the process.
        atexit.register(self.close)

    @classmethod
    def connect(
        cls,
        address: str,
        certificates: Path | None,
        run_id: str,
        rank: int,
        world_size: int,
        name: str,
        timeout: float = 120.0,
        local: bool = False,
    ) -> HubMember:
        """Join the group; return when all members have come, or at once as a newcomer to a running group.

        Raises:
            ExchangeTimeout: no hub, or members missing after ``timeout`` seconds; the message names them.
            ExchangeError: the hub refused this member.
            BadInput: unreadable certificates.
        """
        deadline = time.monotonic() + timeout
        while True:
            member = cls(address, certificates, run_id, rank, world_size, name, local)
            try:
                if member._say_hello(deadline):
                    member._wait_for_group(deadline)
                    return member
            except BaseException:
                member.close()
                raise
            member.close()
            time.sleep(_RETRY)

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def is_newcomer(self) -> bool:
        return self._newcomer

    @property
    def anchor_wanted(self) -> bool:
        status = self._status
        return status is not None and status.anchor_wanted and not self._publishing

    def _start_mean(
        self, name: str, values: torch.Tensor, weight: float, codec: Codec, flags: bytes, stream: str
    ) -> Pending[MeanResult]:
        if values.dim() != 1 or values.dtype != torch.float32:
            raise ValueError(f"{name}: a flat fp32 vector belongs here, not {values.dtype} of {list(values.shape)}")
        return self._start(
            name, lambda: MeanOperation(name, values, weight, codec, self.rank, self._meter, flags, stream)
        )

    def _start_gather(self, name: str, payload: bytes) -> Pending[dict[int, bytes]]:
        if len(payload) > wire.MAX_GATHER_BYTES:
            raise ValueError(f"{name}: a payload of {len(payload)} bytes is above 4 MiB")
        return self._start(name, lambda: GatherOperation(name, payload, self._meter))

    def expect_model(self, elements: int) -> None:
        self._uploads.put(iter([wire.pack(wire.Model(elements))]))

    def residual(self, stream: str, elements: int) -> torch.Tensor | None:
        if self.rank != min(self._members):
            return None
        name = f"residual/{stream}"
        try:
            return self._start(name, lambda: ResidualOperation(name, stream, elements, self._meter)).wait()
        except ExchangeError:
            return None

    def restore_residual(self, stream: str, values: torch.Tensor) -> None:
        self._uploads.put(residual_frames(stream, values))

    def publish_anchor(self, anchor: Anchor) -> None:
        data = anchor_to_bytes(replace(anchor, operations=self.operations))
        self._publishing = True
        self._uploads.put(wire.pack_payload(AnchorChunk("", 0, 0, wire.EMPTY), data))

    def ask_for_anchor(self) -> None:
        """Say as a newcomer that the anchor may come; the others wait for this member from then on. Idempotent."""
        if self._newcomer and len(self._channels) == 1:
            assert self._status is not None
            self._open(transport.BULK, self._bulk_frames(self._status.session), self._take_frame)

    def fetch_anchor(self, timeout: float = ANCHOR_DEADLINE) -> Anchor:
        self.ask_for_anchor()
        with self._changed:
            there = self._changed.wait_for(lambda: self._anchor is not None or bool(self._ended), timeout)
        if not there:
            raise ExchangeTimeout(f"no anchor came within {timeout:g} s")
        if self._anchor is None:
            raise ExchangeError(self._ended)
        anchor, self._anchor = self._anchor, None
        self._newcomer = False
        self.operations = anchor.operations
        return anchor

    def close(self) -> None:
        atexit.unregister(self.close)
        if not self._ended and self._readers:
            self._words.put(ControlUp(goodbye=Goodbye()))
            self._end("this member has left the group")
            self._readers[0].join(_GOODBYE_WITHIN)
        self._end("this member has left the group")
        self._hang_up()
        for channel in self._channels:
            channel.close()
        for reader in self._readers:
            reader.join(_GOODBYE_WITHIN)
        if len(self._readers) > 1:
            self._uploading_ended.wait(_GOODBYE_WITHIN)

    # -- joining -----------------------------------------------------------------------------------------------------

    def _say_hello(self, deadline: float) -> bool:
        """Open both connections; return whether the hub answered, or ``False`` to try again.

        Raises:
            ExchangeError: the hub refused, or its certificate is not of this run.
            ExchangeTimeout: no hub answered before the deadline.
        """
        self._open(transport.CONTROL, self._control_messages(), self._take_status)
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None or bool(self._ended), deadline - time.monotonic())
        if self._status is not None:
            if not self._status.newcomer:  # a newcomer has its model to build, and nobody is to wait for that
                self._open(transport.BULK, self._bulk_frames(self._status.session), self._take_frame)
            return True
        if self._refused:
            raise ExchangeError(self._ended)
        if time.monotonic() + _RETRY >= deadline:
            raise ExchangeTimeout(self._ended or f"the hub at {self._address} did not answer")
        return False

    def _wait_for_group(self, deadline: float) -> None:
        def settled() -> bool:
            return bool(self._ended) or (self._status is not None and (self._status.started or self._status.newcomer))

        with self._changed:
            there = self._changed.wait_for(settled, deadline - time.monotonic())
        if self._ended:
            raise ExchangeError(self._ended)
        assert self._status is not None
        if not there:
            missing = ", ".join(self._status.missing)
            raise ExchangeTimeout(f"the group is not complete: {missing} did not come to the hub at {self._address}")
        self._newcomer = self._status.newcomer
        self._members = tuple(sorted({*self._status.members, self.rank}))

    def _open(self, method: str, messages: Iterator[bytes], take: Callable[[bytes], None]) -> None:
        channel = transport.open_channel(self._address, self._certificates)
        self._channels.append(channel)
        call = channel.stream_stream(method)(messages)
        reader = threading.Thread(target=self._read, args=(call, take), name=f"member{method}", daemon=True)
        self._readers.append(reader)
        reader.start()

    # -- the streams -------------------------------------------------------------------------------------------------

    def _read(self, call: Any, take: Callable[[bytes], None]) -> None:
        try:
            for message in call:
                take(message)
            self._end(f"the hub at {self._address} ended the connection")
        except grpc.RpcError as error:
            self._refused = error.code() == grpc.StatusCode.INVALID_ARGUMENT or _is_tls(error)
            self._end(self._explain(error))
        except WireError as error:
            self._end(f"the hub at {self._address} sent invalid data: {error}")
        finally:
            self._end("the exchange failed inside this member")
            self._hang_up()

    def _explain(self, error: Any) -> str:
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            return str(error.details())
        if _is_tls(error):
            return f"the hub at {self._address} is of another run: its certificate does not match"
        if self._status is None:
            return f"cannot reach the hub at {self._address}: {error.details()}"
        return f"lost the hub at {self._address}: {error.details()}"

    def _control_messages(self) -> Iterator[bytes]:
        yield ControlUp(hello=self._hello).SerializeToString()
        while True:
            try:
                word = self._words.get(timeout=HEARTBEAT)
            except queue.Empty:
                self._beat()
                word = ControlUp(heartbeat=Heartbeat())
            if word is None:
                return
            yield word.SerializeToString()

    def _beat(self) -> None:
        """Count heartbeats without an answer. Not a clock: a machine that slept must first hear what waits for it."""
        self._silent_beats += 1
        if self._silent_beats > LEASE / HEARTBEAT and not self._local:
            self._end(f"lost the hub at {self._address}: silent for {LEASE:g} s")
            self._hang_up()

    def _bulk_frames(self, session: int) -> Iterator[bytes]:
        try:
            yield wire.pack(wire.Open(self.rank, session))
            while True:
                frames = self._uploads.get()
                if frames is None:
                    return
                for frame in frames:
                    self._meter.sent(len(frame))
                    yield frame
                del frames  # they may hold a vector, and the next may be long in coming
        finally:
            self._uploading_ended.set()

    def _take_status(self, message: bytes) -> None:
        status = wire.parse_status(message)
        with self._changed:
            self._silent_beats = 0
            self._publishing = self._publishing and status.anchor_wanted
            self._status = status
            self._changed.notify_all()

    def _take_frame(self, message: bytes) -> None:
        self._meter.received(len(message))
        frame = wire.parse(message)
        if isinstance(frame, AnchorChunk):
            self._take_anchor(frame)
            return
        if isinstance(frame, (wire.Open, wire.Model)):
            raise WireError("a frame that only members send")
        operation = self._operations.get(frame.name)
        if operation is None:
            return  # it failed or was given up here
        if isinstance(frame, Failed):
            self._finish(operation, f"exchange {frame.name} failed: it {frame.message}")
        elif deliver(operation, frame):
            self._members = operation.members or self._members
            self._finish(operation)

    def _take_anchor(self, frame: AnchorChunk) -> None:
        if frame.chunk == 0:
            self._anchor_pieces = []
        if frame.chunk != len(self._anchor_pieces):
            raise WireError("pieces of an anchor out of order")
        self._anchor_pieces.append(frame.payload)
        if frame.chunk < frame.chunks - 1:
            return
        data, self._anchor_pieces = b"".join(self._anchor_pieces), []
        try:
            anchor = anchor_from_bytes(data)
        except ExchangeError as error:
            raise WireError(str(error)) from error
        with self._changed:
            self._members = frame.members
            self._anchor = anchor
            self._changed.notify_all()

    # -- operations --------------------------------------------------------------------------------------------------

    def _start(self, name: str, make: Callable[[], Started]) -> Started:
        if not wire.is_name(name):
            raise ValueError(f"'{name}' cannot be the name of an exchange")
        if self._ended:
            raise ExchangeError(self._ended)
        operation = make()
        self._operations[name] = operation
        self._uploads.put(self._guarded(operation))
        if self._ended:
            self._finish(operation, self._ended)
        return operation

    def _guarded(self, operation: HubOperation[Any]) -> Iterator[bytes]:
        """The operation's frames; what its codec cannot carry fails the operation, not the stream."""
        try:
            yield from operation.frames()
        except ValueError as error:
            self._finish(operation, f"exchange {operation.name}: {error}")

    def _finish(self, operation: HubOperation[Any], error: str = "") -> None:
        self._operations.pop(operation.name, None)
        operation.finish(error)

    def _end(self, reason: str) -> None:
        """The connection is over; the first reason stays."""
        with self._changed:
            if self._ended:
                return
            self._ended = reason
            self._changed.notify_all()
        for operation in list(self._operations.values()):
            self._finish(operation, reason)

    def _hang_up(self) -> None:
        """Let both sending threads end."""
        self._words.put(None)
        self._uploads.put(None)


def _is_tls(error: Any) -> bool:
    details = (error.details() or "").lower()
    words = ("ssl", "handshake", "certificate", "verification")
    return any(word in details for word in words) and "timed out" not in details
