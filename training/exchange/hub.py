"""The hub: the gRPC server that all members dial.

It runs in a process of its own, :mod:`training.exchange.hub_main`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from profiles.errors import BadInput
from training.events import WarningEvent
from training.exchange import transport, wire
from training.exchange.certificates import member_uri
from training.exchange.group import Group, Log
from training.exchange.seat import HubConfig, Outbox, Seat
from training.exchange.wire import WireError

_TICK = 0.1
_CONTROL_BYTES = 1 << 16
MOST_HELLOS = 30
_MOST_REFUSALS = 120
_IDENTIFY_WITHIN = 10.0
"""Seconds a peer has for the handshake, and again to say who it is: silent connections must not pile up."""


class Hub:
    """A running hub.

    Args:
        config: what to serve.
        log: receives member and warning events, from any thread.
    """

    def __init__(self, config: HubConfig, log: Log | None = None) -> None:
        self._config = config
        self._log: Log = log or (lambda event: None)
        self._group = Group(config, self._log)
        self._stopping = threading.Event()
        self._streams: set[_Stream] = set()
        self._streams_lock = threading.Lock()
        self._refusals = _PerMinute(_MOST_REFUSALS)
        self._hellos = defaultdict[int, _PerMinute](lambda: _PerMinute(MOST_HELLOS))
        streams = 4 * (len(config.names) + config.spare) + 8
        self._server = grpc.server(
            ThreadPoolExecutor(streams, thread_name_prefix="hub"),
            options=[*transport.SERVER_OPTIONS, ("grpc.server_handshake_timeout_ms", int(1e3 * _IDENTIFY_WITHIN))],
            maximum_concurrent_rpcs=streams,
        )
        handlers = {
            "Control": grpc.stream_stream_rpc_method_handler(self._control),
            "Bulk": grpc.stream_stream_rpc_method_handler(self._bulk),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(transport.SERVICE, handlers),))
        self._ticker = threading.Thread(target=self._tick, name="hub-ticker", daemon=True)

    def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BadInput: the port is taken, or traffic in clear was asked for on a network address.
        """
        host = f"[{self._config.address}]" if ":" in self._config.address else self._config.address
        address = f"{host}:{self._config.port}"
        try:
            if self._config.certificates is None:
                transport.require_loopback(address)
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, transport.server_credentials(self._config.certificates))
        except RuntimeError:
            raise BadInput(f"cannot listen on {address}", "choose another hub_port, or 0 for any free one") from None
        self._server.start()
        self._ticker.start()
        return int(port)

    def ban(self, rank: int) -> None:
        """Drop a member and let it in no more."""
        self._group.ban(rank)

    def admit(self, rank: int) -> None:
        """Take a ban back."""
        self._group.admit(rank)

    def stop(self) -> None:
        """End all streams and stop serving. Idempotent."""
        self._stopping.set()
        self._group.close("the hub was stopped")
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.outbox.close("the hub was stopped")
        self._server.stop(1.0).wait()

    def _tick(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(_TICK):
            now = time.monotonic()
            self._group.tick(now, min(now - last, 3 * _TICK))
            last = now
            with self._streams_lock:
                late = [s for s in self._streams if s.seat is None and now - s.opened > _IDENTIFY_WITHIN]
            for stream in late:
                stream.outbox.close("said nothing")

    def _control(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        stream = _Stream(context, Outbox(_CONTROL_BYTES))

        def take(message: bytes) -> None:
            control = wire.parse_control(message)
            if stream.seat is None:
                self._check_peer(context, control.hello.rank if control.HasField("hello") else -1)
                if not self._hellos[control.hello.rank].take():
                    raise WireError("it reconnects too often")
                stream.seat = self._group.hello(control.hello, stream.outbox)
            elif control.HasField("goodbye"):
                self._group.leave(stream.seat)
            elif control.HasField("hello"):
                raise WireError("a second hello")
            self._group.heard(stream.seat)

        return self._serve("control", stream, requests, take)

    def _bulk(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        stream = _Stream(context, Outbox(self._group.limits.queued_bytes))

        def take(message: bytes) -> None:
            frame = wire.parse_upload(message, self._group.limits)
            if stream.seat is not None:
                self._group.receive(stream.seat, frame)
            elif isinstance(frame, wire.Open):
                self._check_peer(context, frame.rank)
                stream.seat = self._group.open_bulk(frame, stream.outbox)
            else:
                raise WireError("a bulk stream that does not name its member")

        return self._serve("bulk", stream, requests, take)

    def _serve(
        self, kind: str, stream: _Stream, requests: Iterator[bytes], take: Callable[[bytes], None]
    ) -> Iterator[bytes]:
        stream.of = (kind, *stream.context.auth_context().get("x509_subject_alternative_name", []))
        with self._streams_lock:
            older = [other for other in self._streams if other.of == stream.of and len(stream.of) > 1]
            self._streams.add(stream)
        for other in older:  # a certificate has one stream of each kind: nobody can take up the others' places
            other.outbox.close("its certificate has opened another stream")
        if not stream.context.add_callback(stream.outbox.close):
            stream.outbox.close()
        threading.Thread(target=self._read, args=(stream, requests, take), name="hub-reader", daemon=True).start()
        try:
            yield from stream.outbox
        finally:
            with self._streams_lock:
                self._streams.discard(stream)
        if stream.outbox.reason:
            stream.context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            stream.context.set_details(stream.outbox.reason)

    def _read(self, stream: _Stream, requests: Iterator[bytes], take: Callable[[bytes], None]) -> None:
        """Take all that comes on a stream; the member goes with its stream."""
        reason = "its connection broke"
        try:
            for message in requests:
                take(message)
        except WireError as error:
            reason = str(error)
            if stream.seat is None and self._refusals.take():
                self._log(WarningEvent(message=f"refused a connection from {stream.context.peer()}: {reason}"))
            stream.outbox.close(reason)
        except grpc.RpcError:
            pass
        finally:
            if stream.seat is not None:
                self._group.lose(stream.seat, reason)
            stream.outbox.close()

    def _check_peer(self, context: Any, rank: int) -> None:
        """Raise ``WireError`` unless the peer's certificate is that of ``rank`` in this run."""
        if rank < 0:
            raise WireError("a control stream that does not begin with a hello")
        if self._config.certificates is None:
            return
        names = context.auth_context().get("x509_subject_alternative_name", [])
        if member_uri(self._config.run_id, rank).encode() not in names:
            raise WireError(f"its certificate is not that of rank {rank}")


class _PerMinute:
    """So many of something in a minute, and no more: whatever is written down of it must not grow without end."""

    def __init__(self, most: int) -> None:
        self._taken: deque[float] = deque(maxlen=most)

    def take(self) -> bool:
        """Return whether there is one left, and take it."""
        now = time.monotonic()
        if len(self._taken) == self._taken.maxlen and now - self._taken[0] < 60.0:
            return False
        self._taken.append(now)
        return True


class _Stream:
    """One open stream of the server."""

    def __init__(self, context: Any, outbox: Outbox) -> None:
        self.context = context
        self.outbox = outbox
        self.seat: Seat | None = None
        self.of: tuple[object, ...] = ()
        """Its kind, and whose certificate it has shown."""
        self.opened = time.monotonic()
