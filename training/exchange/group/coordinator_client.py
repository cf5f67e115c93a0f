"""A member's connection to the coordinator: a thread of its own, which redials when the connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import ssl
import threading
import time
from collections.abc import Callable

from profiles.quantities import span_text
from training.exchange.base import ExchangeTimeout
from training.exchange.coordinator_protocol import (
    BEAT,
    Configuration,
    GroupStatus,
    ProtocolError,
    Report,
    encode_line,
    newest_of,
    parse,
)
from training.exchange.event_loop import end_other_tasks
from training.exchange.group.election import DIAL_SECONDS, check_member
from training.exchange.group.join_config import JoinConfig, parse_endpoint
from training.exchange.group.succession import Succession, open_tls
from training.exchange.links.certificates import COORDINATOR_NAME
from training.exchange.links.handshake import tls_contexts

_RETRY = 0.2
_MIN_PAUSE, _PROGRESS_PAUSE, _ANSWER_PAUSE = 0.02, 0.2, 0.5
"""Minimum seconds between two reports, from one to the next that is about operations alone, and to one that only
acknowledges a status: each takes processor time from training and from the exchange."""
_UNREACHED_AFTER, _UNREACHED_EVERY = 3.0, 10.0
"""Seconds of failed dialling after which it is reported, and between further reports."""
_LEAVE_SECONDS = 5.0
"""Seconds the coordinator has to confirm that a member leaves."""


class CoordinatorClient:
    """Reports this member's state to the coordinator, and receives the group's status.

    Args:
        listening: address at which other members dial this one.
        report: returns the member's state; called in this connection's thread.
        on_status: called with every status; must not block.
        on_end: called at most once, with why the group is lost for this member and whether it may return as a newcomer.
    """

    def __init__(
        self,
        joining: JoinConfig,
        listening: tuple[str, int],
        report: Callable[[], Report],
        on_status: Callable[[GroupStatus], None],
        on_end: Callable[[str, bool], None],
    ) -> None:
        self._joining = joining
        self._lease, self._redial_for = joining.lease, joining.redial_for
        _, self._context = tls_contexts(joining.certificates)
        if self._context is not None:
            self._context.check_hostname = True
        self._hello = joining.hello(listening)
        self._addresses = functools.partial(joining.reached_at, listening[0])
        self._state = report
        self._committed: Configuration | None = None
        self.succession = Succession(joining, lambda: self._report())
        self._on_status = on_status
        self._on_end = on_end
        self._connected = False
        self._closing = self._may_return = self._report_is_due = self._is_urgent = self._answers = False
        self._heard, self._reported_at = 0, 0.0
        self._loop = asyncio.new_event_loop()
        self._wake_up = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="control", daemon=True)

    def start(self, seconds: float) -> None:
        """Start dialling; keep trying for up to ``seconds`` until the first connection."""
        self._deadline = time.monotonic() + seconds
        self._thread.start()

    def notify(self, urgent: bool = True) -> None:
        """Schedule a report: the member's state has changed.

        Args:
            urgent: ``False``: an operation has begun or ended, and others may follow soon.
        """
        if self._is_urgent or (self._report_is_due and not urgent):
            return  # not sent yet: another wake-up would cost more than the operation
        self._report_is_due, self._is_urgent = True, urgent
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake_up.set)

    def close(self) -> None:
        """Announce that this member leaves, and hang up. Idempotent."""
        self._closing = True
        self.notify()
        if self._thread.ident is None:
            self._loop.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)
        self.succession.release()

    def _main(self) -> None:
        try:
            why = self._loop.run_until_complete(self._run())
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - ending silently would hang the run
            why = f"the connection with the coordinator failed: {error}"
        self._loop.run_until_complete(end_other_tasks())
        self._loop.close()
        if not self._closing:
            self._on_end(why, self._may_return)

    @property
    def address(self) -> str:
        """Current ``host:port`` of the coordinator."""
        return self.succession.endpoints[0]

    def _report(self) -> Report:
        report, committed = self._state(), self._committed
        earlier = tuple(c for c in report.earlier if committed is None or c.epoch > committed.epoch)
        allegiance = self._joining.allegiance
        barred = tuple(sorted((allegiance.barred | allegiance.banned) - allegiance.readmitted))
        connection = {"committed": committed, "heard": self._heard}
        return report.model_copy(update={**connection, "earlier": earlier, "barred": barred})

    def note_full(self, mesh: Configuration) -> None:
        """Note that this member is connected with all others of a mesh: all have adopted it, so it is committed."""

        def commit() -> None:
            self._committed = newest_of(mesh, self._committed)

        if self._joining.stand_in is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(commit)

    async def _run(self) -> str:
        """Maintain the connection; return why it is given up."""
        report_at = time.monotonic() + _UNREACHED_AFTER
        while True:
            address = self.address
            try:
                reader, writer = await self._dial(address)
            except ssl.SSLError:
                problem = "its certificate does not match"
                if not self._connected:  # else another process has its port while it restarts
                    return f"{parse_endpoint(address)[0]} answers for another run: {problem}"
            except (OSError, asyncio.TimeoutError) as error:
                number = error.errno if isinstance(error, OSError) else None  # what asyncio says of it is for programs
                problem = os.strerror(number) if number and number > 0 else "it does not answer"
            else:
                try:
                    problem, final = await self._exchange_messages(reader, writer)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError, asyncio.TimeoutError):
                        await asyncio.wait_for(writer.wait_closed(), _RETRY)
                    writer.transport.abort()
                if final:
                    return problem
                report_at = time.monotonic() + _UNREACHED_AFTER
            if time.monotonic() >= report_at and not self._closing:
                report_at = time.monotonic() + _UNREACHED_EVERY
                successor = self.succession.allegiance.successor
                self._joining.on_unreachable(address, problem, None if successor is None else successor.carrier)
            if not self._closing:
                self.succession.begin_search()
                await self.succession.wait()
            if (successor := self.succession.result(True)) is not None:
                self.succession.follow(successor)
            else:
                self.succession.rotate()
            self.succession.prepare()
            if self._closing or time.monotonic() + _RETRY >= self._deadline:
                return f"{self._unreached(address)}: {problem}"
            await asyncio.sleep(_RETRY)

    async def _open_coordinator(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        successor, endpoint = self.succession.allegiance.successor, parse_endpoint(address)
        if successor is None:
            return await open_tls(endpoint, self._context, COORDINATOR_NAME)
        reader, writer = await self.succession.open_member(*endpoint)
        check_member(writer, self._joining.identity, successor.carrier)
        return reader, writer

    async def _dial(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, as long as ``address`` is the coordinator's.

        Raises:
            OSError, asyncio.TimeoutError: it does not answer there, or its address has changed.
        """
        dialling = asyncio.ensure_future(self._open_coordinator(address))
        now = time.monotonic()
        patience = max(self.succession.elects_at - now, DIAL_SECONDS)
        end = now + max(_RETRY, min(self._lease, self._deadline - now, patience))
        while not dialling.done() and time.monotonic() < end and self.address == address:
            await asyncio.wait({dialling}, timeout=_RETRY)
        if not dialling.done():
            dialling.cancel()
            raise asyncio.TimeoutError
        return dialling.result()

    def _unreached(self, address: str) -> str:
        lost = "has lost" if self._connected else "cannot reach"
        return f"{lost} the machine that holds the run together ({parse_endpoint(address)[0]})"

    def overdue(self, status: GroupStatus) -> ExchangeTimeout:
        """Return the error that names the members that did not connect in time; ``status`` is the last one received."""
        if not self._connected:
            return ExchangeTimeout(self._unreached(self.address))
        missing = ", ".join(status.missing) or "somebody"
        return ExchangeTimeout(f"the group is not complete: {missing} did not connect")

    async def _exchange_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bool]:
        """Send and receive until the connection ends; return why, and whether that is final."""
        writer.write(encode_line(self._hello.model_copy(update={"hosts": self._addresses()})))
        self._heard = 0
        sending = asyncio.create_task(self._send(writer))
        try:
            while True:
                data = await self._next(reader)
                if not data:
                    if sending.done():
                        sending.result()  # raises why it ended
                    return "it ended the connection", self._closing
                status = parse(GroupStatus, data)
                if status.failed:
                    self._may_return = status.may_return
                    return status.failed, status.may_return or not self.succession.is_on_trial
                self._connected, now = True, time.monotonic()
                self._acknowledge(status)
                self.succession.note_vote()
                self._committed = newest_of(status.committed, self._committed)
                self.succession.meet(status)
                self._on_status(status)
                if not status.held:
                    self.succession.settle()
                    self._deadline = now + self._redial_for
                elif now > self._deadline:
                    return "too few members can be reached to go on as the run, and a minority does not train on", True
                self.succession.begin_search()
                if (successor := self.succession.result(status.held)) is not None:
                    self.succession.follow(successor)
                    return "another machine carries the coordinator", False
        except (asyncio.TimeoutError, TimeoutError):
            return f"silent for {span_text(self._lease)}", False
        except ssl.SSLError as error:
            return (
                f"it is of another run, or refuses this member's certificate ({error.reason})",
                not self._connected,
            )
        except OSError as error:
            return error.strerror or "the connection broke", False
        except (ProtocolError, ValueError) as error:
            return str(error), not self.succession.is_on_trial
        finally:
            sending.cancel()

    def _acknowledge(self, status: GroupStatus) -> None:
        """Report soon that this status has arrived, unless another report does."""
        self._heard = status.sent
        if not self._answers:
            self._answers = True
            self._loop.call_at(max(self._loop.time(), self._reported_at + _ANSWER_PAUSE), self._wake_up.set)

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        """Wait for the next line, in two steps: if the process is stopped during the first, its timeout expires before
        lines that arrived meanwhile have been looked at.

        Raises:
            asyncio.TimeoutError: no line arrived during the lease.
        """
        if self.succession.is_local:
            return await reader.readline()
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            return await asyncio.wait_for(reader.readline(), self._lease - BEAT)
        return await asyncio.wait_for(reader.readline(), BEAT)

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        """Send reports; a member that ceases to, whatever ends it, must not look alive to the coordinator."""
        try:
            await self._send_reports(writer)
        except BaseException:
            writer.transport.abort()
            raise

    async def _send_reports(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._wake_up.clear()
            self._report_is_due = self._is_urgent = self._answers = False
            leaves, self._reported_at = self._closing, self._loop.time()
            writer.write(encode_line(self._report().model_copy(update={"leaves": leaves})))
            with contextlib.suppress(OSError):
                await writer.drain()
            if leaves:  # the coordinator hangs up: closing with unread data would discard what was sent
                return
            self.succession.prepare()
            await asyncio.sleep(_MIN_PAUSE)
            await self._wait_for_news(BEAT)
            if self._report_is_due and not self._is_urgent:
                self._wake_up.clear()
                await self._wait_for_news(_PROGRESS_PAUSE)

    async def _wait_for_news(self, seconds: float) -> None:
        """Wait for the next wake-up, up to ``seconds``."""
        timer = self._loop.call_later(seconds, self._wake_up.set)
        await self._wake_up.wait()
        timer.cancel()
