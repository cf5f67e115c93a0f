"""What members hand one another beside their operations: results that one missed, and the state for newcomers."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from training.exchange.base import MAX_BROADCAST, Anchor, ExchangeError
from training.exchange.control import AnchorOrder, Form, Status
from training.exchange.ledger import Ledger
from training.exchange.link import OPERATIONS, Incoming, Outgoing, PeerLost
from training.exchange.listener import Listener
from training.exchange.mesh import Mesh, Operation
from training.exchange.owners import Outcome
from training.exchange.payloads import anchor_from_bytes, anchor_to_bytes
from training.exchange.ways import Address

_SIZE = struct.Struct("<Q")
_MEET_SECONDS = 60.0
"""Within which a donor and a newcomer find each other."""
_PATIENCE = 3600.0
"""Within which a state has gone over; the coordinator gives up earlier on who takes none."""
_TAG = OPERATIONS - 1
"""Of what is handed over on a mesh, before its first operation."""


def even_out(mesh: Mesh, form: Form, ledger: Ledger, lock: AbstractContextManager[object]) -> None:
    """Hand results over a new mesh to those who miss them.

    Raises:
        PeerLost: a member is gone, or sends something else.
        ExchangeError: a result is not kept any more.
    """
    if form.donor == mesh.rank:
        for rank, full in form.behind.items():
            with lock:
                missing = ledger.results(full, form.stand)
            for outcome in missing:
                data = outcome.to_bytes()
                mesh.send(rank, _TAG, memoryview(_SIZE.pack(len(data)))).wait()
                mesh.send(rank, _TAG, memoryview(data)).wait()
    for number in range(form.behind.get(mesh.rank, form.stand) + 1, form.stand + 1):
        head = bytearray(_SIZE.size)
        mesh.receive(form.donor, _TAG, memoryview(head)).wait()
        room = bytearray(_checked(_SIZE.unpack(head)[0]))
        mesh.receive(form.donor, _TAG, memoryview(room)).wait()
        try:
            with lock:
                ledger.adopt(number, Outcome.from_bytes(room))
        except ExchangeError as error:
            raise PeerLost(form.donor, mesh.names[form.donor], str(error)) from error


class AnchorDesk:
    """Where the state of a member goes to newcomers, over connections of their own.

    The donor begins no operation after the anchor until the newcomers are in: so they take part from there on.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._order = 0
        """The order that this member carries out or has carried out as a donor."""
        self._after: int | None = None

    def wanted(self, status: Status | None, rank: int) -> bool:
        """Whether this member is to publish an anchor and has not."""
        order = status.anchor if status is not None else None
        return order is not None and order.donor == rank and order.number != self._order

    def holds(self, number: int) -> bool:
        """Whether an operation has to wait for newcomers."""
        return self._after is not None and number > self._after

    def release(self, status: Status) -> bool:
        """Hold nothing any more where the newcomers are in, or gone; return whether that is so now."""
        if self._after is None or (status.anchor is not None and status.anchor.number == self._order):
            return False
        self._after = None
        return True

    def publish(self, order: AnchorOrder, anchor: Anchor, relay: Address | None) -> None:
        """Hand the anchor to all newcomers of an order, in threads of their own."""
        self._order, self._after = order.number, anchor.operations
        data = anchor_to_bytes(anchor)
        for rank in order.peers:
            if rank != order.donor:
                threading.Thread(target=self._send, args=(order, rank, data, relay), name="anchor", daemon=True).start()

    def _send(self, order: AnchorOrder, rank: int, data: bytes, relay: Address | None) -> None:
        """Whoever does not take it is seen by the coordinator."""
        peer = order.peers[rank]
        try:
            by = time.monotonic() + _MEET_SECONDS
            connection = self._listener.meet(_channel(order), rank, True, peer.addresses, by, relay)
        except ExchangeError:
            return
        link = Outgoing(connection, rank, {rank: peer.name}, lambda lost: None)
        for part in (_SIZE.pack(len(data)), data):
            link.submit(_sender(memoryview(part)), lambda error: None)
        link.close(_PATIENCE)

    def fetch(self, order: AnchorOrder, deadline: float, relay: Address | None, wanted: Callable[[], bool]) -> Anchor:
        """Receive the anchor of an order.

        Raises:
            ExchangeTimeout: the donor did not come, or the order is off.
            PeerLost: the donor is gone.
            ExchangeError: what came cannot be read.
        """
        peer = order.peers[order.donor]
        connection = self._listener.meet(_channel(order), order.donor, False, peer.addresses, deadline, relay, wanted)
        link = Incoming(connection, order.donor, {order.donor: peer.name}, lambda lost: None)
        try:
            head = bytearray(_SIZE.size)
            _received(link, memoryview(head))
            data = bytearray(_checked(_SIZE.unpack(head)[0]))
            _received(link, memoryview(data))
        finally:
            link.cut()
            link.close(0.0)
        return anchor_from_bytes(bytes(data))


def _channel(order: AnchorOrder) -> str:
    return f"anchor {order.number}"


def _sender(data: memoryview) -> Callable[[Outgoing], None]:
    return lambda link: link.send(_TAG, data)


def _received(link: Incoming, into: memoryview) -> None:
    operation = Operation(1)

    def receive(one: Incoming) -> None:
        if one.receive(_TAG, into) != len(into):
            raise one.lost("it sent less than it said")

    link.submit(receive, operation.part_ended)
    operation.wait()


def _checked(size: int) -> int:
    if size > MAX_BROADCAST:
        raise ExchangeError(f"a member says that it hands over {size} bytes")
    return size
