"""The links of one group: messages between any two members, and reductions by owners.

A reduction of ``n`` members is a reduce-scatter and an all-gather (Thakur et al. 2005, "Optimization of Collective
Communication Operations in MPICH", section 4.5): every member owns a shard of the vector, receives the others'
contributions to it, adds them up **in rank order**, and sends the outcome to all: ``2 (n - 1) / n`` of the vector in
each direction if shards are equal. The outcome has the same bits on all members and for every choice of shards. A
shard travels in pieces, so that the arithmetic overlaps with the transfer of the next pieces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from training.exchange.links.connection import Connection
from training.exchange.links.dialling import interface_at
from training.exchange.links.link import MARKS, OPERATIONS, Incoming, Outgoing, PeerLost
from training.exchange.links.listener import Address, Listener
from training.exchange.links.loop import Loop
from training.exchange.mean.reduction import BufferPool, OwnedShard, Reduction
from training.exchange.mean.transfer import Done, PendingTransfer
from training.records.events import PeerPath

SMALL = 32 << 10
"""Bytes up to which every member sends to all: a second round would cost more than the bytes."""
_CLOSE_SECONDS = 5.0
_FORM_SECONDS = 60.0
_FAREWELL_SECONDS, _LATEST_FAREWELL = 0.2, 3.0
"""After a loss: seconds until all have noticed, and operations still waiting for bytes must end; the latter only where
a busy peer has not been told yet."""


class Mesh:
    """One member's end of a fully connected group.

    All members start their operations in the same order; several may be in flight. Made by :meth:`form`.
    """

    def __init__(self, rank: int, members: Sequence[int], names: Mapping[int, str]) -> None:
        self.rank = rank
        self.members = sorted(members)
        self.peers = [peer for peer in self.members if peer != rank]
        self.names = names
        self.buffer_pool = BufferPool()
        self.lost: PeerLost | None = None
        self.routes: dict[int, PeerPath] = {}
        """Route of what is sent to each peer, by rank."""
        self.full = 0
        """Number of operations whose results this member has."""
        self.on_settled: Callable[[int], None] = lambda number: None
        """Called with the number of an operation once all members have the results up to it, earlier than the
        coordinator."""
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        self._loop: Loop | None = None
        self.started = 0
        self._lock = threading.Lock()
        self._shards: dict[int, OwnedShard] = {}
        """Shards of the reductions in flight, by their number on the wire."""
        self._closed = False
        self._on_lost: Callable[[PeerLost], None] | None = None

    @classmethod
    def form(
        cls,
        listener: Listener,
        channel: str,
        addresses: Mapping[int, Sequence[Address]],
        names: Mapping[int, str] | None = None,
        seconds: float = _FORM_SECONDS,
        relay: Address | None = None,
        on_lost: Callable[[PeerLost], None] | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Mesh:
        """Connect with every other member.

        Args:
            on_lost: called once, with the first lost member; the callee has to inform the other members.
            is_wanted: whether the group is still to be formed, see :meth:`Listener.connect`.
            channel: name of this group, never used before; equal on all members.
            addresses: where each member listens, by rank; this member's own is ignored.
            relay: address for pairs that cannot dial one another (:class:`~training.exchange.links.relay.Relay`).

        Raises:
            ExchangeTimeout: a member is missing after ``seconds``.
        """
        rank = listener.identity.rank
        member_names = names or {member: f"rank {member}" for member in addresses}
        mesh = cls(rank, list(addresses), member_names)
        mesh._on_lost = on_lost
        peers = {peer: addresses[peer] for peer in mesh.peers}
        out, into = listener.connect(channel, peers, time.monotonic() + seconds, member_names, relay, is_wanted)
        mesh._loop = loop = Loop("links") if mesh.peers else None
        for peer in mesh.peers:
            mesh.routes[peer] = _peer_path(out[peer], peer)
            mesh._in[peer] = Incoming(into[peer], peer, member_names, mesh.break_off, on_lost is None, loop)
            mesh._out[peer] = Outgoing(out[peer], peer, member_names, mesh.break_off, loop)
        return mesh

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes for link in self._out.values())

    @property
    def bytes_received(self) -> int:
        return sum(link.bytes for link in self._in.values())

    def incoming(self, peer: int) -> Incoming:
        return self._in[peer]

    def outgoing(self, peer: int) -> Outgoing:
        return self._out[peer]

    def exchange(
        self,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, Sequence[memoryview]],
        on_done: Done | None = None,
        mark: int = 0,
        start: bool = True,
    ) -> PendingTransfer:
        """Send buffers to some members and receive others' into buffers of the same size.

        The buffers belong to the operation until it is complete. All members take part, possibly with nothing.

        Args:
            start: ``False``: this thread drives it at once (:meth:`PendingTransfer.drive`).
            mark: below :data:`~training.exchange.links.link.MARKS`, identifies what is exchanged: where a peer's
                differs, its connection ends before one is mistaken for the other.
        """
        return self._exchange(self._next(mark), sends, receives, on_done).submit(start)

    def send(self, peer: int, tag: int, data: memoryview) -> PendingTransfer:
        """Send one message to a member, which asks for ``tag``; independent of this mesh's other operations."""
        return self._exchange(tag * MARKS, {peer: [data]}, {}, None).submit()

    def receive(self, peer: int, tag: int, into: memoryview) -> PendingTransfer:
        """Receive a message that a member sends with ``tag``."""
        return self._exchange(tag * MARKS, {}, {peer: [into]}, None).submit()

    def reduce(
        self, reduction: Reduction, on_done: Done | None = None, mark: int = 0, start: bool = True
    ) -> PendingTransfer:
        """Start a reduction; ``reduction`` has its outcome when the operation is complete. For ``start`` see
        :meth:`exchange`."""
        return self.prepare(reduction, on_done, mark).submit(start)

    def prepare(
        self, reduction: Reduction, on_done: Done | None = None, mark: int = 0, number: int | None = None
    ) -> PendingTransfer:
        """Prepare a reduction. Like a gather, it starts when it is submitted: several prepared operations have to be
        submitted in their order, which is the same on all members.

        Args:
            number: of the operation, if not all members take part in all operations.
        """
        number, on_done = self._next(mark, number), self._in_turn(on_done)
        shard = OwnedShard(reduction, self.rank)
        peers = [peer for peer in self.peers if peer in reduction.pieces]
        own_pieces = range(reduction.pieces[self.rank])
        with self._lock:
            self._shards[number] = shard
        if self.lost is not None:
            shard.fail()

        def on_end(error: Exception | None) -> None:
            with self._lock:
                self._shards.pop(number, None)
            if on_done is not None:
                on_done(error)

        def sender(peer: int) -> Callable[[Outgoing], Iterator[int]]:
            def send(link: Outgoing) -> Iterator[int]:
                for piece in range(reduction.pieces[peer]):
                    yield from link.send(number, *reduction.contribution(peer, piece))
                for piece in own_pieces:
                    yield from link.send(number, (yield from shard.outcome(piece)))

            return send

        def receiver(peer: int) -> Callable[[Incoming], Iterator[int]]:
            def receive(link: Incoming) -> Iterator[int]:
                for piece in own_pieces:
                    size = yield from link.receive(number, reduction.contribution_buffer(peer, piece))
                    shard.arrived(peer, piece, size)
                for piece in range(reduction.pieces[peer]):
                    size = yield from link.receive(number, reduction.outcome_buffer(peer, piece))
                    reduction.take(peer, piece, size)

            return receive

        for piece in own_pieces if not peers else ():
            reduction.reduce_piece(piece, {})
        operation = PendingTransfer(2 * len(peers), on_end, lambda: self.lost)
        for peer in peers:
            operation.add(self._out[peer], sender(peer))
            operation.add(self._in[peer], receiver(peer))
        return operation

    def break_off(self, lost: PeerLost) -> None:
        """End all operations because a member is lost, and tell the other members which one.

        A member that learns of several losses, or only sees this end hang up, could not tell which member was lost
        first.
        """
        with self._lock:
            if self.lost is not None or self._closed:
                return
            self.lost = lost
            shards = list(self._shards.values())
        for shard in shards:
            shard.fail()
        for peer in self.peers if self._on_lost is None else ():
            self._out[peer].say_farewell(lost)
        if self._on_lost is not None:
            self._cut()
            return self._on_lost(lost)
        self._cut_informed(lost.rank, time.monotonic() + _LATEST_FAREWELL)

    def give_up(self) -> None:
        """End all operations; none completes after this returns. Must not be called from a thread of its links."""
        self.end()
        self.close()

    def end(self) -> None:
        """End all operations, without waiting for that."""
        with self._lock:
            self._on_lost = self._on_lost or (lambda lost: None)
            if self.lost is None:
                self.lost = PeerLost(self.rank, self.names[self.rank], "the group is formed anew")
            shards = list(self._shards.values())
        for shard in shards:
            shard.fail()
        self._cut()  # which has the links look for changes

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Let operations in flight end, and hang up. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + seconds
        for link in self.links():
            link.drain(max(0.0, deadline - time.monotonic()))
        for link in self.links():
            link.cut()
        for link in self.links():
            link.close(0.0)

    def _cut(self) -> None:
        for link in self.links():
            link.cut()

    def _cut_informed(self, lost: int, latest: float) -> None:
        """Cut the links a little later; those to members other than the lost one only once they are told of the loss: a
        member that only sees its link end takes its peer for the lost one."""

        def cut() -> None:
            late = time.monotonic() >= latest
            informed = [link for link in self.links() if late or link.peer == lost or self._out[link.peer].idle]
            for link in informed:
                link.cut()
            if len(informed) < len(self.links()):
                self._cut_informed(lost, latest)

        timer = threading.Timer(_FAREWELL_SECONDS, cut)
        timer.daemon = True
        timer.start()

    def links(self) -> list[Outgoing | Incoming]:
        return [*self._out.values(), *self._in.values()]

    def _in_turn(self, on_done: Done | None) -> Done | None:
        """Return the callback for the end of an operation; subclasses may delay it until earlier operations have
        ended."""
        return on_done

    def _next(self, mark: int, number: int | None = None) -> int:
        with self._lock:
            self.started = self.started + 1 if number is None else number
            return self.started % (OPERATIONS - 1) * MARKS + mark

    def gather(
        self,
        data: memoryview,
        buffers: Mapping[int, memoryview],
        on_received: Callable[[int, int], None],
        on_done: Done | None,
        number: int,
        mark: int = 0,
    ) -> PendingTransfer:
        """Prepare to send ``data`` to each member that has a buffer, and to receive at most the buffer's length from
        each. The operation starts when it is submitted or carried out.

        Args:
            on_received: called with rank and size of each message; an exception from it ends the connection.
        """
        number = self._next(mark, number)
        operation = PendingTransfer(2 * len(buffers), self._in_turn(on_done), lambda: self.lost)

        def receiver(peer: int) -> Callable[[Incoming], Iterator[int]]:
            def receive(link: Incoming) -> Iterator[int]:
                on_received(peer, (yield from link.receive(number, buffers[peer])))

            return receive

        for peer in buffers:
            operation.add(self._out[peer], _sender(number, [data]))
        for peer in buffers:
            operation.add(self._in[peer], receiver(peer))
        return operation

    def _exchange(
        self,
        number: int,
        sends: Mapping[int, Sequence[memoryview]],
        receives: Mapping[int, Sequence[memoryview]],
        on_done: Done | None,
    ) -> PendingTransfer:
        operation = PendingTransfer(len(sends) + len(receives), on_done, lambda: self.lost)
        for peer, buffers in sends.items():
            operation.add(self._out[peer], _sender(number, buffers))
        for peer, buffers in receives.items():
            operation.add(self._in[peer], _receiver(number, buffers))
        return operation


def _sender(number: int, buffers: Sequence[memoryview]) -> Callable[[Outgoing], Iterator[int]]:
    def send(link: Outgoing) -> Iterator[int]:
        for buffer in buffers:
            yield from link.send(number, buffer)

    return send


def _receiver(number: int, buffers: Sequence[memoryview]) -> Callable[[Incoming], Iterator[int]]:
    def receive(link: Incoming) -> Iterator[int]:
        for buffer in buffers:
            size = yield from link.receive(number, buffer)
            if size != len(buffer):
                raise link.lost(f"it sent {size} bytes where {len(buffer)} belong")

    return receive


def _peer_path(connection: Connection, peer: int) -> PeerPath:
    local_address = str(connection.socket.getsockname()[0])
    return PeerPath(
        peer=peer,
        how=connection.route,
        address=connection.address,
        interface=interface_at(local_address),
        loses_large=connection.loses_large,
    )
