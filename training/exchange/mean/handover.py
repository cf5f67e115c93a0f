"""What members hand over outside of operations: results that a member missed, and the state with which a newcomer joins
at the next synchronisation point."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from training.exchange.base import (
    MAX_GATHER_BYTES,
    Confirm,
    ExchangeDropped,
    ExchangeError,
    ExchangeTimeout,
    Group,
    JoiningState,
)
from training.exchange.coordinator_protocol import GroupStatus, HeldResults, MeshStart, StateOrder, encode_line, parse
from training.exchange.links.dialling import Address
from training.exchange.links.link import OPERATIONS, Incoming, Outgoing, PeerLost
from training.exchange.links.listener import Listener
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.operation_log import OperationLog
from training.exchange.mean.outcomes import OperationResult, gather_buffer
from training.exchange.mean.transfer import PendingTransfer
from training.exchange.payloads import state_from_bytes, state_to_bytes

_SIZE = struct.Struct("<Q")
_MEET_SECONDS = 60.0
"""Seconds within which a donor and a newcomer must connect."""
_TRANSFER_SECONDS = 3600.0
"""Seconds within which a state must be transferred; the coordinator gives up earlier on a newcomer that does not take
it."""
TAG = OPERATIONS - 1
"""Tag of what is handed over on a mesh, before its first operation."""


def handover_limit(elements: int, members: int) -> int:
    """Return the largest size in bytes of a result or state that is handed over, given the length of the model's
    longest vector: sixteen of them in fp32, each member's payload of a gather, and 256 MiB."""
    return 64 * max(elements, 0) + MAX_GATHER_BYTES * members + (256 << 20)


def hand_over_missing(
    mesh: Mesh, form: MeshStart, operation_log: OperationLog, lock: AbstractContextManager[object], max_bytes: int
) -> None:
    """Send results over a new mesh to the members that miss them; results of a group's operation stay within the group.

    Args:
        max_bytes: limit of one result's size.

    Raises:
        PeerLost: a member is gone, or sends something invalid.
        ExchangeDropped: this member misses a result that is no longer kept, or has one that its group has recomputed
            without it.
    """
    with lock:
        own_results = operation_log.held(min(form.behind.values(), default=form.stand))
    held_by_rank = _exchange_held(mesh, own_results)
    astray = holders_of_recomputed(held_by_rank)
    if mesh.rank in astray:
        raise ExchangeDropped("the others recomputed a result without it that it already had")
    held_by_rank = {rank: held for rank, held in held_by_rank.items() if rank not in astray}
    for number, donor, receiver in plan_transfers(held_by_rank):
        if donor == mesh.rank:
            with lock:
                data = operation_log.result(number).to_bytes()
            mesh.send(receiver, TAG, memoryview(_SIZE.pack(len(data)))).wait()
            mesh.send(receiver, TAG, memoryview(data)).wait()
        elif receiver == mesh.rank:
            _receive_result(mesh, donor, number, operation_log, lock, max_bytes)
    with lock:
        gone = any(held.dropped > operation_log.full for rank, held in held_by_rank.items() if rank != mesh.rank)
    if gone and operation_log.full < form.stand:
        raise ExchangeDropped(f"the result of exchange {operation_log.full + 1} is no longer kept")


def _exchange_held(mesh: Mesh, own_results: HeldResults) -> dict[int, HeldResults]:
    """Exchange with the other members which results each of them holds."""
    buffers = {peer: gather_buffer(MAX_GATHER_BYTES) for peer in mesh.peers}
    held_by_rank = {mesh.rank: own_results}

    def received(peer: int, size: int) -> None:
        held_by_rank[peer] = parse(HeldResults, bytes(buffers[peer][:size]))

    mesh.gather(memoryview(encode_line(own_results)), buffers, received, None, 0).submit().wait()
    return held_by_rank


def plan_transfers(held_by_rank: Mapping[int, HeldResults]) -> list[tuple[int, int, int]]:
    """Return the transfers of results in their order: operation number, donor and receiver of each."""
    planned = []
    holders: dict[int, dict[int, Group]] = {}
    for rank, held in sorted(held_by_rank.items()):
        for number, group, _ in held.results:
            holders.setdefault(number, {})[rank] = group
    for number, have in sorted(holders.items()):
        for receiver in sorted(rank for rank, held in held_by_rank.items() if held.full < number and rank not in have):
            donors = [rank for rank, group in have.items() if not group or receiver in group]
            planned += [(number, min(donors), receiver)] if donors else []
    return planned


def holders_of_recomputed(held_by_rank: Mapping[int, HeldResults]) -> set[int]:
    """Return the ranks that hold a result which others of their group have recomputed without them."""
    results = [(rank, *result) for rank, held in held_by_rank.items() for result in held.results]
    return {
        rank
        for rank, number, group, members in results
        for _, other, theirs, without in results
        if number == other and group == theirs and rank in members and rank not in without
    }


def _receive_result(
    mesh: Mesh,
    donor: int,
    number: int,
    operation_log: OperationLog,
    lock: AbstractContextManager[object],
    max_bytes: int,
) -> None:
    head = bytearray(_SIZE.size)
    mesh.receive(donor, TAG, memoryview(head)).wait()
    try:
        buffer = bytearray(_check_size(_SIZE.unpack(head)[0], max_bytes))
        mesh.receive(donor, TAG, memoryview(buffer)).wait()
        with lock:
            operation_log.adopt(number, OperationResult.from_bytes(buffer))
    except PeerLost:
        raise
    except ExchangeError as error:
        raise PeerLost(donor, mesh.names[donor], str(error)) from error


class JoinStateServer:
    """Hands a member's state to newcomers, over connections of their own.

    The donor starts no operation after the joining state until the newcomers are members, so they take part from there.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._order = 0
        """Number of the order that this member carries out, or has carried out, as the donor."""
        self._after: int | None = None

    def must_publish(self, status: GroupStatus, rank: int) -> bool:
        """Whether this member has to publish a joining state and has not yet."""
        order = status.joining
        return order is not None and order.donor == rank and order.number != self._order

    def must_wait(self, number: int) -> bool:
        """Whether an operation has to wait for newcomers."""
        return self._after is not None and number > self._after

    def release(self, status: GroupStatus) -> bool:
        """Stop holding operations back once the newcomers are in, or gone; return whether that happened."""
        if self._after is None or (status.joining is not None and status.joining.number == self._order):
            return False
        self._after = None
        return True

    def publish(self, order: StateOrder, joining: JoiningState, relay: Address | None) -> None:
        """Hand the joining state to all newcomers of an order, in background threads."""
        self._order, self._after = order.number, joining.operations
        data = state_to_bytes(joining)
        for rank in order.peers:
            if rank != order.donor:
                threading.Thread(target=self._send, args=(order, rank, data, relay), name="state", daemon=True).start()

    def _send(self, order: StateOrder, rank: int, data: bytes, relay: Address | None) -> None:
        """Send the state to one newcomer; the coordinator notices if it does not arrive."""
        peer = order.peers[rank]
        try:
            by = time.monotonic() + _MEET_SECONDS
            connection = self._listener.meet(channel_of(order), rank, True, peer.addresses, by, relay)
        except ExchangeError:
            return

        def send(link: Outgoing) -> Iterator[int]:
            for chunk in (_SIZE.pack(len(data)), data):
                yield from link.send(TAG, memoryview(chunk))

        link = Outgoing(connection, rank, {rank: peer.name}, lambda lost: None)
        link.submit(send, lambda error: None)
        link.close(_TRANSFER_SECONDS)

    def fetch(
        self, order: StateOrder, deadline: float, relay: Address | None, is_wanted: Callable[[], bool], max_bytes: int
    ) -> JoiningState:
        """Receive the joining state of an order, of at most ``max_bytes`` bytes.

        Raises:
            ExchangeTimeout: the donor did not connect, or the order was withdrawn.
            PeerLost: the donor is gone.
            ExchangeError: the state is unreadable.
        """
        peer = order.peers[order.donor]
        connection = self._listener.meet(
            channel_of(order), order.donor, False, peer.addresses, deadline, relay, is_wanted
        )
        link = Incoming(connection, order.donor, {order.donor: peer.name}, lambda lost: None)
        try:
            head = bytearray(_SIZE.size)
            _receive_exactly(link, memoryview(head))
            data = bytearray(_check_size(_SIZE.unpack(head)[0], max_bytes))
            _receive_exactly(link, memoryview(data))
        finally:
            link.cut()
            link.close(0.0)
        return state_from_bytes(bytes(data))


def channel_of(order: StateOrder) -> str:
    """Return the channel on which donor and newcomer connect."""
    return f"state {order.number}"


def _receive_exactly(link: Incoming, into: memoryview) -> None:
    def receive(incoming: Incoming) -> Iterator[int]:
        if (yield from incoming.receive(TAG, into)) != len(into):
            raise incoming.lost("it sent less than it announced")

    transfer = PendingTransfer(1)
    transfer.add(link, receive)
    transfer.submit().wait()


def _check_size(size: int, max_bytes: int) -> int:
    if size > max_bytes:
        raise ExchangeError(f"a member says that it hands over {size} bytes, where {max_bytes} may come")
    return size


T = TypeVar("T")


class Newcomer:
    """A member that waits to join.

    Args:
        changed: notified of every change of the group.
        status: returns the group as the coordinator sees it.
        ended: returns why the group is lost for this member, if it is.
        note: reports a change of this member to the coordinator.
        deadline: of :func:`time.monotonic`.
        max_bytes: limit of the state's size.
    """

    def __init__(
        self,
        state_server: JoinStateServer,
        changed: threading.Condition,
        status: Callable[[], GroupStatus],
        ended: Callable[[], ExchangeError | None],
        note: Callable[..., None],
        deadline: float,
        max_bytes: int,
    ) -> None:
        self._state_server, self._changed, self._status, self._ended, self._note = (
            state_server,
            changed,
            status,
            ended,
            note,
        )
        self._deadline, self._max_bytes = deadline, max_bytes
        self._number = 0

    def join(
        self,
        relay: Callable[[], Address | None],
        take: Callable[[JoiningState], None],
        is_in: Callable[[], bool],
        confirm: Confirm | None = None,
    ) -> JoiningState:
        """Return the state with which this member joined.

        Args:
            take: called with each state that arrives; a later one may replace it.
            is_in: whether this member has a mesh.
            confirm: see :meth:`training.exchange.base.Exchange.fetch_state`.

        Raises:
            ExchangeTimeout: not by the deadline.
            ExchangeError: the group is lost.
        """
        while True:
            self._note(ready=True)
            order = self._wait(self._new_order)
            self._number = order.number
            joining = self._fetch(order, relay())
            if confirm is not None and not confirm(joining):  # the donors are held by orders that none carries out
                self._withdraw(lambda: self._status().joining is None)
            elif joining is None:
                if self._is_ordered():  # the donor carries out each order once: another is needed
                    self._withdraw(lambda: not self._is_ordered())
            else:
                take(joining)
                self._note(taken=order.number)
                self._wait(lambda: is_in() or self._is_off())
                if is_in():
                    return joining
                if confirm is not None:
                    raise ExchangeError("the state that it took was withdrawn")

    def _fetch(self, order: StateOrder, relay: Address | None) -> JoiningState | None:
        """Return the state of an order; ``None``: it did not arrive."""
        try:
            return self._state_server.fetch(order, self._deadline, relay, self._is_ordered, self._max_bytes)
        except (PeerLost, ExchangeTimeout):
            return None

    def _withdraw(self, is_over: Callable[[], bool]) -> None:
        """Ask for no state until no order that this member cannot carry out is left."""
        self._note(ready=False)
        self._wait(is_over)

    def _wait(self, condition: Callable[[], T | None]) -> T:
        with self._changed:
            outcome = self._changed.wait_for(lambda: self._ended() or condition(), self._deadline - time.monotonic())
        if isinstance(outcome, ExchangeError):
            raise outcome
        if not outcome:
            raise ExchangeTimeout("the training state did not arrive in time")
        return outcome

    def _new_order(self) -> StateOrder | None:
        order = self._status().joining
        return order if order is not None and order.number != self._number else None

    def _is_ordered(self) -> bool:
        """Whether the current order is still valid."""
        order = self._status().joining
        return self._ended() is None and order is not None and order.number == self._number

    def _is_off(self) -> bool:
        """Whether this member still waits, and its state is outdated."""
        return self._status().newcomer and not self._is_ordered()
