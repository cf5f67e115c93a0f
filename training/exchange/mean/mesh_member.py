"""A member of the mesh engine: its operations run on the current mesh, and outlive it."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from training.exchange.base import (
    JOINING_DEADLINE,
    Confirm,
    Contribution,
    Exchange,
    ExchangeDropped,
    ExchangeError,
    Group,
    JoiningState,
    MeanResult,
    Pending,
    Traffic,
)
from training.exchange.coordinator_protocol import Configuration, GroupStatus, MeshStart, Report
from training.exchange.group.coordinator_client import CoordinatorClient
from training.exchange.group.join_config import JoinConfig, parse_endpoint
from training.exchange.halting import Halting
from training.exchange.links.link import PeerLost
from training.exchange.links.listener import Address, Listener, PeerMissing
from training.exchange.mean.handover import JoinStateServer, Newcomer, hand_over_missing, handover_limit
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.mesh_operations import MeshGather, MeshMean, MeshOperation, Meter
from training.exchange.mean.operation_log import OperationLog
from training.exchange.mean.reduction import BufferPool
from training.exchange.mean.transfer import PendingTransfer
from training.exchange.residuals import MeanResiduals, Residual
from training.records.events import MOST_WAYS

_FORM_SECONDS, _LEAVE_SECONDS = 20.0, 15.0
"""Seconds to connect a mesh, and until the others have a leaving member's results."""
R = TypeVar("R")


class MeshMember(Exchange):
    """One member: a connection to the coordinator, and a mesh with the other members, replaced as membership changes.

    Raises:
        BadInput: unreadable certificates.
    """

    engine, mesh_kind, sends_encoded = "mesh", Mesh, True
    halting: Halting

    def __init__(self, joining: JoinConfig) -> None:
        self.rank = rank = joining.rank
        self._joining, self._meter = joining, Meter()
        self.traffic: Traffic = self._meter.traffic
        self._shards = dict(joining.shards or {})
        self._listener = Listener(joining.listen, joining.identity)
        self._residuals, self._buffer_pool = MeanResiduals(), BufferPool()
        self._changed = threading.Condition()
        self._status = GroupStatus()
        """The last one received; before the first, no group is known."""
        self._ended: ExchangeError | None = None
        self._report = Report()
        self.mesh: Mesh | None = None
        self._log, self._begun = OperationLog(rank), 0
        """The operations, and the number of the last one that was started on the current mesh."""
        self._newcomer = self._away = self._closed = False
        self._completing = 0
        """Operations that have ended on the current mesh and whose result is being processed."""
        self._forming: Mesh | None = None
        self._state_server, self.halting = JoinStateServer(self._listener), Halting(self._note)
        callbacks = self._current_report, self._on_status, self._end
        self._client = CoordinatorClient(joining, self._listener.address, *callbacks)
        self._listener.answer_questions(self._client.succession.answer_question)
        self._keeper = threading.Thread(target=self._keep_mesh, name="mesh keeper", daemon=True)
        # A thread that is still inside C++ when the interpreter goes would abort the process.
        atexit.register(self.close)

    def join(self, timeout: float) -> MeshMember:
        """Join the group; return when all members have connected, or at once as a newcomer to a running group.

        Raises:
            ExchangeTimeout: no coordinator, or members missing after ``timeout`` seconds; the message names them.
            ExchangeError: the coordinator refused this member.
        """
        deadline = time.monotonic() + timeout
        try:
            self._client.start(timeout)
            self._keeper.start()
            self._wait_for_group(deadline)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def members(self) -> tuple[int, ...]:
        return self._log.members

    @property
    def is_newcomer(self) -> bool:
        return self._newcomer

    @property
    def must_publish_state(self) -> bool:
        return self._state_server.must_publish(self._status, self.rank)

    def expect_model(self, elements: int) -> None:
        self._note(elements=elements)

    def residual(self, stream: str) -> Residual | None:
        return self._residuals.whole_vector(stream)

    def restore_residual(self, stream: str, residual: Residual) -> None:
        self._residuals.restore(stream, residual)

    def give_up(self, why: str) -> None:
        self._end(why, False)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._note(leaving=True)
        with self._changed:
            self._changed.wait_for(self._may_leave, 0.0 if self._closed else _LEAVE_SECONDS)
            if self._closed:
                return
            self._closed = True
            mesh = self.mesh
        if mesh is not None:
            mesh.close()
        self._client.close()
        self._end("this member has left the group", False)
        self._listener.close()
        if self._keeper.ident is not None and threading.current_thread() is not self._keeper:
            self._keeper.join(_FORM_SECONDS)
        if self.mesh is not None:
            self.mesh.give_up()

    def _may_leave(self) -> bool:
        """Whether no other member could still need this member's contribution to repeat an operation."""
        return self._ended is not None or self._status.closed >= self._log.full

    # -- operations --------------------------------------------------------------------------------------------------

    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        self._check()
        ours = (self._meter, self._residuals, self._shards, self._buffer_pool)
        return self._start(MeshMean(self.operations, contribution, *ours, borrows=waits), waits)

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        self._check()
        return self._start(MeshGather(self.operations, name, payload, self._meter, group), waits)

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _start(self, operation: MeshOperation[R], waits: bool) -> MeshOperation[R]:
        begun: list[PendingTransfer] = []
        with self._changed:
            ended = self._ended
            if ended is None and self._log.start(operation):
                begun = self._begin()
        if ended is not None:
            operation.finish(ended)
        for transfer in begun:
            transfer.submit(start=not waits)
        self._client.notify(urgent=False)
        return operation

    def _begin(self) -> list[PendingTransfer]:
        """Prepare, in order, the operations that can start on the current mesh; the lock is held."""
        begun = []
        for operation in self._log.pending(self._begun):
            if self.mesh is None or self._state_server.must_wait(operation.number):
                break
            self.mesh.full, self._begun = self._log.full, operation.number
            on_end = functools.partial(self._on_operation_end, self.mesh, operation)
            operation.transfer = operation.begin(self.mesh, on_end)
            begun.append(operation.transfer)
        return begun

    def _on_operation_end(self, mesh: Mesh, operation: MeshOperation[Any], error: Exception | None) -> None:
        """Handle an operation's end on a mesh; after an error, or if it is too late, the next mesh repeats it."""
        with self._changed:
            if error is not None or self.mesh is not mesh or self._ended is not None:
                return
            self._completing += 1
        try:
            outcome = operation.complete()  # in parallel with other operations
        except Exception as problem:  # noqa: BLE001 - the contribution may have changed: it cannot be repeated
            self._end(f"the result of '{operation.name}' cannot be used: {problem}", False)
            outcome = None
        with self._changed:
            self._completing -= 1
            self._count_traffic()
            if outcome is not None and self._log.waits_for(operation.number) is not None:
                self._log.settle(operation.number, outcome)
            self._log.forget(self._status.settled)
            if self.mesh is not mesh:  # the keeper waits for this
                self._changed.notify_all()
        self._client.notify(urgent=False)

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _note(self, **news: Any) -> None:
        with self._changed:
            self._report = self._report.model_copy(update=news)
        self._client.notify()

    def _current_report(self) -> Report:
        with self._changed:
            self._count_traffic()
            moved = self.traffic.bytes_sent + self.traffic.bytes_received
            position = {**self._log.position(), "moved": moved}
            return self._report.model_copy(update=position)

    def _on_status(self, status: GroupStatus) -> None:
        with self._changed:
            self._status = status
            self._away |= not status.newcomer and bool(status.members) and self.rank not in status.members
            for transfer in self._begin() if self._state_server.release(status) else ():
                transfer.submit()
            self._log.forget(status.settled)
            if self._forming is not None and not self._is_wanted(self._report.epoch):
                self._forming.end()  # its keeper may wait in vain
            self._changed.notify_all()
        self.halting.process_status(status)
        self._listener.wake()

    def _end(self, why: str, may_return: bool) -> None:
        """Record that the group is lost for this member."""
        error = ExchangeDropped(why) if may_return else ExchangeError(why)
        with self._changed:
            if self._ended is not None:
                return
            self._ended = error
            pending = self._log.drop_all()
            self._changed.notify_all()
        self._listener.wake()
        for operation in pending:
            operation.finish(error)

    def _wait_for_group(self, deadline: float) -> None:
        def settled() -> bool:
            return self._ended is not None or self.mesh is not None or self._status.newcomer

        with self._changed:
            is_settled = self._changed.wait_for(settled, deadline - time.monotonic())
        if self._ended is not None:
            raise self._ended
        if not is_settled:
            raise self._client.overdue(self._status)
        self._newcomer = self.mesh is None

    # -- from mesh to mesh -------------------------------------------------------------------------------------------

    def _keep_mesh(self) -> None:
        """Main function of the keeper's thread."""
        try:
            self._run_keeper()
        except Exception as error:  # noqa: BLE001 - a thread that ends silently would hang the run
            self._end(f"the mesh failed: {error}", False)

    def _run_keeper(self) -> None:
        """Give meshes up and form new ones, as the coordinator orders."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                status, mesh = self._status, self.mesh
                if self._ended is not None:
                    break
            if mesh is not None:
                with self._changed:  # from here on no operation succeeds on it
                    self._count_traffic()
                    self.mesh = None
                mesh.give_up()
                with self._changed:
                    self._changed.wait_for(lambda: not self._completing)
            if status.form is None:
                self._note(epoch=status.epoch, up=False)
            else:
                self._form(status.epoch, status.form)
        if mesh is not None and not self._closed:
            mesh.give_up()

    def _has_work(self) -> bool:
        """Whether the keeper has something to do."""
        status, report = self._status, self._report
        if self._ended is not None:
            return True
        if status.newcomer or status.epoch < report.epoch:
            return False
        if status.form is None:
            return bool(status.epoch) and (report.up or report.epoch < status.epoch)
        return status.epoch > report.epoch

    def _form(self, epoch: int, form: MeshStart) -> None:
        mine = {"epoch": epoch, "mesh": epoch, "members": tuple(form.peers), "earlier": form.earlier, "routes": ()}
        self._note(up=True, lost=None, why="", hung_up=False, taken=0, ready=False, **mine)
        names = {rank: peer.name for rank, peer in form.peers.items()}
        addresses: dict[int, Sequence[Address]] = {rank: peer.addresses for rank, peer in form.peers.items()}
        mesh: Mesh | None = None
        try:
            mesh = self.mesh_kind.form(
                self._listener,
                f"epoch {epoch}",
                addresses,
                names,
                _FORM_SECONDS,
                on_lost=functools.partial(self._broken, epoch),
                relay=self._relay(),
                is_wanted=lambda: self._is_wanted(epoch),
            )
            self._client.note_full(Configuration.of(epoch, form.peers))
            with self._changed:
                self._forming = mesh
            self._prepare(mesh)
            limit = handover_limit(self._report.elements, len(form.peers))
            hand_over_missing(mesh, form, self._log, self._changed, limit)
        except (ExchangeError, OSError) as error:
            if mesh is not None:
                mesh.give_up()
            if isinstance(error, ExchangeDropped):
                return self._end(str(error), True)
            self._broken(epoch, error)
            return
        mesh.buffer_pool = self._buffer_pool
        if not form.away:
            mesh.on_settled = functools.partial(self._forget_settled, mesh)
        with self._changed:
            self.mesh, self._forming = mesh, None
            self._meter.begin_mesh()
            self._begun = 0  # operations without a result start again
            self._log.members = tuple(mesh.members)
            self._newcomer = False
            self._changed.notify_all()
            for transfer in self._begin():
                transfer.submit()
        self._note(routes=tuple(mesh.routes.values())[:MOST_WAYS])
        if self._away:
            self._away = False
            self._joining.on_return()

    def _prepare(self, mesh: Mesh) -> None:
        """Prepare a mesh for its first operation; raises ``ExchangeError`` if that is impossible."""

    def _broken(self, epoch: int, error: Exception) -> None:
        """Report that the mesh of an epoch is broken."""
        rank = error.rank if isinstance(error, (PeerLost, PeerMissing)) and error.rank != self.rank else None
        with self._changed:
            self._forming = None
            if self._report.epoch != epoch or not self._report.up:
                return
        hung_up = isinstance(error, PeerLost) and error.hung_up
        self._note(up=False, lost=rank, why=str(error)[:300], hung_up=hung_up)

    def _forget_settled(self, mesh: Mesh, number: int) -> None:
        """Forget results that all current members have."""
        with self._changed:
            if self.mesh is mesh:
                self._log.forget(number)

    def _relay(self) -> Address | None:
        coordinator, relay = self._client.succession.endpoints
        relay_there = (parse_endpoint(coordinator)[0], self._status.relay) if self._status.relay else None
        return parse_endpoint(relay) if relay else relay_there

    def _is_wanted(self, epoch: int) -> bool:
        status = self._status
        return self._ended is None and status.epoch == epoch and status.form is not None

    def _count_traffic(self) -> None:
        """Add the traffic of the current mesh since the last call; the lock is held."""
        if self.mesh is not None:
            self._meter.update(self.mesh.bytes_sent, self.mesh.bytes_received)

    # -- newcomers ---------------------------------------------------------------------------------------------------

    def publish_state(self, joining: JoiningState) -> None:
        if (order := self._status.joining) is not None:
            self._state_server.publish(order, replace(joining, operations=self.operations), self._relay())

    def fetch_state(self, timeout: float = JOINING_DEADLINE, confirm: Confirm | None = None) -> JoiningState:
        state = (lambda: self._status), (lambda: self._ended), self._note
        deadline, limit = time.monotonic() + timeout, handover_limit(self._report.elements, 0)
        newcomer = Newcomer(self._state_server, self._changed, *state, deadline, limit)
        return newcomer.join(self._relay, self._begin_after, lambda: self.mesh is not None, confirm)

    def _begin_after(self, joining: JoiningState) -> None:
        with self._changed:
            self.operations = joining.operations
            self._log.begin_after(joining.operations)
