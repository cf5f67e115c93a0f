"""The hub's view of the group: who is there, what they exchange, who gets the anchor. No network in here."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Literal

from training.events import MemberEvent, WarningEvent
from training.exchange import wire
from training.exchange.averaging import answered, averaged, gathered
from training.exchange.error_feedback import MeanResiduals
from training.exchange.hub_pb2 import Hello, Status
from training.exchange.rounds import Closing, Contribution, Round, RoundBook
from training.exchange.seat import MOST_NOT_FINITE, HubConfig, ModelSize, Outbox, Seat
from training.exchange.wire import AnchorChunk, BytesChunk, Failed, HubLimits, MeanChunk, ResidualChunk, WireError

Log = Callable[[MemberEvent | WarningEvent], None]
STATUS_INTERVAL = 1.0
_BANNED = "it was dropped from the run"
_MODEL_SHARE = 0.8
"""Of the time after which a round is given up: how long a member may build its model while the others wait."""


class Group:
    """All members of a run and their rounds. Every method may be called from any thread.

    Averaging runs in the thread that brought the last contribution, outside the lock.
    """

    def __init__(self, config: HubConfig, log: Log) -> None:
        self._config = config
        self._log = log
        self._size = ModelSize(config.limits, len(config.names) + config.spare)
        self._lock = threading.RLock()
        self._seats: dict[int, Seat] = {}
        self._banned: set[int] = set()
        self._started = False
        self._anchor: list[bytes] = []
        self._anchor_size = 0
        self._anchor_from: Seat | None = None
        self._since_status = 0.0
        self._start_age = 0.0
        self._residuals = MeanResiduals(self.limits.elements)
        self._book = RoundBook(config.quorum, config.round_deadline, config.give_up, self.limits)

    @property
    def limits(self) -> HubLimits:
        return self._size.limits

    def hello(self, hello: Hello, control: Outbox) -> Seat:
        """Seat a member. One that is seated already is lost: its machine came back.

        Raises:
            WireError: not a member of this run, or no more, or nobody is left to join.
        """
        self._check_hello(hello)
        with self._lock:
            if hello.rank in self._banned:
                raise WireError(_BANNED)
            if hello.rank in self._seats:
                self._vacate(self._seats[hello.rank], "lost", "came back on a new connection")
            if self._started and not self._live():
                raise WireError("no member is left that has the state; resume the run from its newest snapshot")
            seat = Seat(hello.rank, hello.name, control, newcomer=self._started)
            self._seats[seat.rank] = seat
            how = "joins a running group" if seat.newcomer else ""
            self._log(MemberEvent(member=seat.rank, name=seat.name, status="joined", message=how))
            self._tell_all()
        self._close_rounds()
        return seat

    def open_bulk(self, frame: wire.Open, bulk: Outbox) -> Seat:
        """Give a seat its bulk stream.

        Raises:
            WireError: no such seat, or it has one.
        """
        with self._lock:
            seat = self._seats.get(frame.rank)
            if seat is None or seat.session != frame.session or seat.bulk is not None:
                raise WireError(_BANNED if frame.rank in self._banned else "a bulk stream without a seat")
            seat.bulk = bulk
            seat.allow(self.limits)
            if not self._started and not self._missing():
                self._started = True
                for other in self._seats.values():
                    other.live = True
            if seat.newcomer:
                self._send(seat, self._anchor)
            self._tell_all()
            return seat

    def heard(self, seat: Seat) -> None:
        """Note a sign of life."""
        seat.silent = 0.0

    def leave(self, seat: Seat) -> None:
        """A member said good-bye."""
        self._remove(seat, "left", "")

    def lose(self, seat: Seat, reason: str) -> None:
        """A member is gone, or has broken the protocol."""
        self._remove(seat, "lost", reason)

    def ban(self, rank: int) -> None:
        """Drop a member and seat it no more: both its streams end with that reason, however far they were opened."""
        with self._lock:
            self._banned.add(rank)
            seat = self._seats.get(rank)
        if seat is not None:
            self._remove(seat, "lost", _BANNED)

    def admit(self, rank: int) -> None:
        """Take a ban back."""
        with self._lock:
            self._banned.discard(rank)

    def receive(self, seat: Seat, frame: wire.Frame) -> None:
        """Take what came on a bulk stream.

        Raises:
            WireError: it does not belong here; the caller ends the stream.
        """
        seat.silent = 0.0
        closing: Closing | None = None
        with self._lock:
            members = len(self._seats)
            if self._seats.get(seat.rank) is not seat:
                return
            if isinstance(frame, wire.Model):
                return self._size.say(seat.rank, frame.elements)
            if not seat.live:
                raise WireError("an operation from a rank that is not a member yet")
            if isinstance(frame, MeanChunk):
                closing = self._receive_mean(seat, frame)
            elif isinstance(frame, AnchorChunk):
                self._receive_anchor(seat, frame)
            elif isinstance(frame, BytesChunk):
                closing = self._receive_gathered(seat, frame)
            elif isinstance(frame, ResidualChunk):
                self._settle_size(seat)
                self._send(seat, answered(frame, self._residuals))
            else:
                raise WireError("an unexpected frame")
            self._drop_outvoted(frame.name)
            fewer = len(self._seats) < members
        if closing is not None:
            self._finish(closing)
        if fewer:  # the others' rounds need not wait for them
            self._close_rounds()

    def tick(self, now: float, elapsed: float) -> None:
        """Look after leases and deadlines; call it a few times a second.

        Args:
            elapsed: seconds since the last call, at most a few ticks, so that a hub that was asleep drops nobody.
        """
        config = self._config
        with self._lock:
            for seat in list(self._seats.values()):
                seat.silent += elapsed
                if seat.silent > config.lease and seat.rank not in config.local:
                    self._vacate(seat, "lost", f"silent for {config.lease:g} s")
            self._since_status += elapsed
            if self._since_status >= STATUS_INTERVAL:
                self._tell_all()
            self._start_age += elapsed if self._started else 0.0
            for rank in self._size.silent(self._live()) if self._start_age > _MODEL_SHARE * config.give_up else ():
                self._vacate(self._seats[rank], "lost", "has not reported its model")
            for late in self._book.overdue(now):
                self._fail(late, f"could not close within {config.give_up:g} s")
        self._close_rounds()

    def close(self, reason: str) -> None:
        """End all streams."""
        with self._lock:
            for seat in list(self._seats.values()):
                for outbox in (seat.control, seat.bulk):
                    if outbox is not None:
                        outbox.close(reason)

    # -- members -----------------------------------------------------------------------------------------------------

    def _check_hello(self, hello: Hello) -> None:
        config = self._config
        if hello.version != wire.PROTOCOL_VERSION:
            raise WireError(f"protocol version {hello.version}, the hub speaks {wire.PROTOCOL_VERSION}")
        if hello.run_id != config.run_id:
            raise WireError("a member of another run")
        planned = len(config.names)
        if hello.world_size != planned or hello.rank >= planned + config.spare:
            raise WireError(f"rank {hello.rank} of {hello.world_size} in a run of {planned}")
        if hello.rank >= planned and not self._started:
            raise WireError(f"rank {hello.rank} comes later, and the run has not begun")

    def _live(self) -> list[int]:
        return sorted(seat.rank for seat in self._seats.values() if seat.live)

    def _waiting(self) -> list[Seat]:
        return [s for s in self._seats.values() if s.newcomer and not s.live and s.bulk is not None]

    def _missing(self) -> list[str]:
        if self._started:
            return []
        seated = {seat.rank for seat in self._seats.values() if seat.bulk is not None}
        return [f"rank {rank} ({name})" for rank, name in enumerate(self._config.names) if rank not in seated]

    def _tell_all(self) -> None:
        """Send everyone the state of the group; who does not read what waits for it is not sent more."""
        self._since_status = 0.0
        live, missing = self._live(), self._missing()
        donor = live[0] if live and self._waiting() and self._anchor_from is None else None
        for seat in self._seats.values():
            seat.control.put(
                Status(
                    session=seat.session,
                    started=self._started and seat.bulk is not None,
                    newcomer=seat.newcomer and not seat.live,
                    anchor_wanted=seat.rank == donor,
                    members=live,
                    missing=missing,
                ).SerializeToString()
            )

    def _remove(self, seat: Seat, status: Literal["left", "lost"], reason: str) -> None:
        with self._lock:
            self._vacate(seat, status, reason)
        self._close_rounds()

    def _vacate(self, seat: Seat, status: Literal["left", "lost"], reason: str) -> None:
        """Idempotent: who goes may take others along that were to go too."""
        if self._seats.get(seat.rank) is not seat:
            return
        del self._seats[seat.rank]
        seat.live = False
        self._book.forget_member(seat.rank)
        self._size.forget(seat.rank)
        if self._anchor_from is seat:
            self._anchor_from, self._anchor = None, []
        for outbox in (seat.control, seat.bulk):
            if outbox is not None:
                outbox.close(reason and f"the hub dropped this member: {reason}")
        self._log(MemberEvent(member=seat.rank, name=seat.name, status=status, message=reason))
        if self._started and not self._live():
            for stranded in [other for other in self._seats.values() if other.newcomer]:
                self._vacate(stranded, "lost", "no member is left that has the state")
        self._tell_all()

    # -- operations --------------------------------------------------------------------------------------------------

    def _receive_mean(self, seat: Seat, frame: MeanChunk) -> Closing | None:
        self._settle_size(seat)
        if frame.elements > self.limits.elements:
            raise WireError(f"a vector of {frame.elements} elements is longer than the model")
        contribution = Contribution(frame.weight, frame, wire.held_bytes(frame.payload))
        signature = (MeanChunk, frame.codec.name, frame.elements, frame.stream)
        return self._enter(seat, frame.name, signature, frame.chunks, frame.chunk, contribution)

    def _receive_gathered(self, seat: Seat, frame: BytesChunk) -> Closing | None:
        self._size.require(seat.rank)
        pieces = seat.collect(frame)
        if pieces is None:
            return None
        contribution = Contribution(0.0, pieces, sum(wire.held_bytes(piece) for piece in pieces))
        return self._enter(seat, frame.name, BytesChunk, 1, 0, contribution)

    def _enter(
        self, seat: Seat, name: str, signature: Hashable, parts: int, part: int, contribution: Contribution
    ) -> Closing | None:
        first = not self._book.has_opened(name, seat.rank)
        now = time.monotonic()
        current = self._book.add(seat.rank, name, signature, parts, part, contribution, now)
        if first:
            for frames in list(current.results.values()):
                self._send(seat, frames)
        return self._book.take(current, part, self._live(), self._moment())

    def _moment(self) -> float:
        """The present, for deadlines: while a member has still to build its model, there are none."""
        return -math.inf if self._size.silent(self._live()) else time.monotonic()

    def _settle_size(self, seat: Seat) -> None:
        """Raises ``WireError`` where ``seat`` has not the model of the others."""
        self._size.require(seat.rank)
        others = self._size.settle(self._live())
        if others is None:
            return
        self._book.limits, self._residuals.limit = self.limits, self.limits.elements
        for known in list(self._seats.values()):
            known.allow(self.limits)
            if known.rank in others and known is not seat:
                self._vacate(known, "lost", others[known.rank])
        if seat.rank in others:
            raise WireError(others[seat.rank])

    def _drop_outvoted(self, name: str = "") -> None:
        """Drop who is at odds with the others about an operation, or about any."""
        for rank, reason in self._book.outvoted(self._live(), self._moment(), name):
            if rank in self._seats:
                self._vacate(self._seats[rank], "lost", reason)

    def _receive_anchor(self, seat: Seat, frame: AnchorChunk) -> None:
        """Hand a piece on to the newcomers; with the last one they are members.

        An anchor that nobody waits for any more is let pass: its donor could not know.
        """
        waiting = self._waiting()
        asked = seat.rank == min(self._live())
        if frame.chunk == 0 and self._anchor_from is None and waiting and asked:
            self._anchor_from, self._anchor, self._anchor_size = seat, [], frame.size
            self._tell_all()
        if self._anchor_from is not seat:
            return
        if frame.chunk != len(self._anchor) or frame.size != self._anchor_size:
            raise WireError("pieces of an anchor out of order")
        last = frame.chunk == frame.chunks - 1
        for newcomer in waiting if last else ():
            newcomer.live = True
            self._log(MemberEvent(member=newcomer.rank, name=newcomer.name, status="ready", message="has the anchor"))
        members = tuple(self._live()) if last else ()
        self._anchor.append(wire.pack(replace(frame, rank=seat.rank, members=members)))
        for newcomer in waiting:
            self._send(newcomer, self._anchor[-1:])
        if last:
            self._anchor_from, self._anchor = None, []
            self._tell_all()

    def _close_rounds(self) -> None:
        """Close what may close after a loss or when time has passed."""
        with self._lock:
            self._drop_outvoted()
            closings = list(self._book.take_all(self._live(), self._moment()))
        for closing in closings:
            self._finish(closing)

    def _finish(self, closing: Closing) -> None:
        """Make the result of a part and send it to all who have opened the round."""
        gathers = closing.round.signature is BytesChunk
        result = gathered(closing) if gathers else averaged(closing, self._residuals)
        with self._lock:
            for rank in result.not_finite:
                self._blame(self._seats.get(rank), closing.round.name)
            for rank, reason in result.broken:
                seat = self._seats.get(rank)
                if seat is not None:
                    self._vacate(seat, "lost", reason)
            if result.failure:
                self._book.fail(closing.round)
                self._fail(closing.round, result.failure)
            elif result.frames:
                self._book.publish(closing, result.frames)
                for rank in sorted(closing.round.openers):
                    self._send(self._seats.get(rank), result.frames)
            else:
                self._book.reopen(closing)
        if result.broken:
            self._close_rounds()

    def _blame(self, seat: Seat | None, name: str) -> None:
        """Note that a member sent NaN or infinity, which our own never do; who does it again and again goes."""
        if seat is None or not seat.note_not_finite(name):
            return
        self._log(WarningEvent(message=f"{seat.name} sent values that are not finite; {name} went on without them"))
        if len(seat.not_finite) == MOST_NOT_FINITE:
            self._vacate(seat, "lost", f"sent values that are not finite {MOST_NOT_FINITE} times")

    def _fail(self, failed: Round, reason: str) -> None:
        absent = sorted(set(self._live()) - failed.openers)
        missing = f"; nothing came from rank {', '.join(map(str, absent))}" if absent else ""
        self._log(WarningEvent(message=f"exchange {failed.name} failed: it {reason}{missing}"))
        frame = wire.pack(Failed(failed.name, f"{reason}{missing}"))
        for rank in sorted(failed.openers):
            self._send(self._seats.get(rank), [frame])

    def _send(self, seat: Seat | None, frames: Iterable[bytes]) -> None:
        if seat is None or seat.bulk is None:
            return
        if not all(seat.bulk.put(frame) for frame in frames):
            self._vacate(seat, "lost", "does not read its results")
