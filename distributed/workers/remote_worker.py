"""A worker on another machine, with the interface of a local one, over SSH and the machine's agent.

The connection may be lost and made again while the worker runs on. :meth:`RemoteWorker.lines` yields every event once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from distributed.agent.requests import Attach, Forget
from distributed.machine.link import MachineLink
from distributed.preparation.transfer import fetch_model
from distributed.ssh.errors import SshError
from distributed.ssh.process import Process
from distributed.workers.agent_records import AgentHello, AgentTimeouts, Assignment, Record, encoded, start_request
from distributed.workers.rendezvous import EngineRoute, RendezvousUpdates, SameAddress
from profiles.errors import ExitCode, MusterError
from profiles.quantities import bytes_text, span_text
from training.records.bounded_fields import first_problem
from training.records.events import ErrorEvent, Event, WarningEvent, to_line
from training.run.processes import UNREACHED, NumberedLine
from training.run.stopping import ProgressMonitor

LOST = 255
"""Exit code of a lost worker."""
LOG_BUDGET = 64 << 20
"""Bytes of a worker's log that are kept on this machine."""
_BACKLOG_SECONDS = 3.0
"""Seconds after connecting in which events may have waited for the connection."""
_POLL = 0.1
"""Seconds between checks of whether a worker that has not started yet is still wanted."""


@dataclass(eq=False)
class RemoteWorker:
    """Implements :class:`training.run.processes.Worker`."""

    link: MachineLink
    assignment: Assignment
    log: BinaryIO
    """Receives the worker's stderr."""
    run_dir: Path
    """Local run folder, which receives the model that the worker saved."""
    secrets: Path
    """Local folder that holds ``member-<rank>/`` by the time the address is sent."""
    route: EngineRoute = SameAddress()
    """Turns an address of the engine into the one to dial on the machine."""
    timeouts: AgentTimeouts = AgentTimeouts()
    ready: Future[None] | None = None
    """Completed when the machine is prepared; the worker starts then, and fails with its failure."""
    await_model_choice: Callable[[], bool] = lambda: True
    """Waits until it is known whether this worker's model becomes the run's, and returns it."""
    keep: Future[bool] | None = None
    """Resolves to whether the run still needs the worker's files on the machine after its end."""
    log_budget: int = LOG_BUDGET
    """Bytes of the worker's log that are kept."""
    is_cut_off: Callable[[], bool] = lambda: False
    """Whether this machine cannot be reached, rather than that of the worker, which then is not given up."""
    adopted: int | None = None
    """Number of the last line that the run has of a worker that a killed supervisor had started; ``None``: start it."""

    def __post_init__(self) -> None:
        self.pid = 0
        self.end_reason = ""
        self.is_unwanted = self.is_connected = False
        self._progress = ProgressMonitor()
        self._commands: list[dict[str, Any]] = []
        self._earlier_commands = 0
        """Number of the commands that the agent has from a killed supervisor."""
        self._changed = threading.Condition()
        self._seen = self.adopted or 0
        self._recorded = 0
        """Number of the newest line that the run has written down, or needs not: its agent may forget it."""
        self._logged = 0
        self._code: int | None = None
        self._done = threading.Event()
        self._agent_ended = threading.Event()
        self._broken: MusterError | None = None
        self._rendezvous = RendezvousUpdates(self.route)
        self.attached = -math.inf
        """When the present connection to its agent was made, by the monotonic clock."""

    # ------------------------------------------------------------------------------------------------ as a worker

    def send(self, message: dict[str, Any]) -> None:
        if "address" not in message:
            self._post({"worker": message})
            return
        if self.adopted is not None and "term" in message:  # the members have elected another coordinator
            return
        numbers = {name: message.pop(name) for name in ("term", "carrier", "meeting") if name in message}
        try:
            rendezvous = self._rendezvous.begin(message) | numbers
        except MusterError as error:
            self._broken = error
            self.signal(signal.SIGKILL)
            return
        if self.adopted is not None:
            rendezvous.pop("store", "")  # where its member's devices met at the start
            return self._post({"worker": {"command": "redial", **rendezvous}})
        self._post({"files": self._certificates(), "worker": rendezvous})

    def _send_new_rendezvous(self, get_update: Callable[[], dict[str, str]]) -> str:
        """Send the worker changed addresses of coordinator and relay, if any; return a note for the log."""
        try:
            update = get_update()
        except MusterError as error:
            return f", but it cannot reach the coordinator: {error.message}"
        if not update:
            return ""
        self._post({"worker": update})
        return f"; it finds the coordinator at {update['address']} now"

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.is_unwanted = True
        self._post({"signal": int(number)})

    def note_event(self, event: Event) -> Event:
        """Note how long steps and snapshots take; add the machine's name to errors, whose paths are of that machine."""
        self._recorded = self._recorded if event.line is None else event.line - 1  # the run writes one after the other
        self._progress(event)
        self.timeouts = replace(self.timeouts, grace=max(self.timeouts.grace, self._progress.time_to_end))
        # An event right after connecting may have been written while the connection was broken.
        is_current = time.monotonic() - self.attached > _BACKLOG_SECONDS
        if isinstance(event, WarningEvent) and event.unreached and is_current:
            get_update = functools.partial(self._rendezvous.replace_address, event.unreached)
            threading.Thread(target=self._send_new_rendezvous, args=(get_update,), daemon=True).start()  # SSH may block
        if not isinstance(event, ErrorEvent) or event.machine:
            return event
        name = self.link.name
        is_named = event.message.startswith(f"{name}:")  # it, or one of its devices
        message = event.message if is_named else f"{name}: {event.message}"
        return event.model_copy(update={"message": message, "machine": name})

    def exit_code(self) -> int:
        self._done.wait()
        assert self._code is not None
        return self._code

    @property
    def ended(self) -> bool:
        """Whether it has ended, and its model is here."""
        return self._done.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait until its agent has been dismissed too; return whether it has."""
        return self._agent_ended.wait(timeout)

    def lines(self) -> Iterator[bytes]:
        try:
            if self.adopted is None:
                if not self._wait_until_ready():
                    self._raise_broken()
                    self._lose("ended before it was started")
                    return
                self.link.ask(start_request(self.assignment, self.timeouts, self.link.root), timeout=30.0)
            yield from self._follow()
            if self._over and self.assignment.brings:
                timeout, name = self.timeouts.give_up, self.assignment.brings
                fetch_model(self.link, *self._folder, self.run_dir, timeout, self.await_model_choice, name)
        except (MusterError, OSError) as error:
            if self._code is None:  # it is given up, and may run on
                self.end_reason = str(error)
            yield self._failure(error)
            self._code = int(ExitCode.NOT_READY)
        finally:
            if self._code is None:
                self._lose("its supervisor stopped listening")
            if self.keep is None or self._code != ExitCode.DONE:
                self._dismiss_agent()
                self._agent_ended.set()
            else:
                threading.Thread(target=self._keep_agent_alive, args=(self.keep,), daemon=True).start()
            self._done.set()

    def _failure(self, error: MusterError | OSError) -> bytes:
        failure = error if isinstance(error, MusterError) else MusterError(str(error), machine=self.link.name)
        event = ErrorEvent.of(failure, self.assignment.rank)
        return to_line(event.model_copy(update={"exit_code": int(ExitCode.NOT_READY)})).encode()

    # ------------------------------------------------------------------------------------------------------ start

    @property
    def _folder(self) -> tuple[str, str]:
        return self.assignment.run_id, self.assignment.folder_name

    def _wait_until_ready(self) -> bool:
        """Return whether the worker is to be started; a run that ends does not wait for files under way.

        Raises:
            MusterError: the machine could not be made ready.
        """
        while self.ready is not None and not self.is_unwanted and wait([self.ready], _POLL).not_done:
            continue
        if self.ready is not None and not self.is_unwanted:
            self.ready.result()
        return not self.is_unwanted

    def _certificates(self) -> dict[str, str]:
        folder = self.secrets / f"member-{self.assignment.rank}"
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return {f"secrets/{folder.name}/{path.name}": encoded(path.read_bytes()) for path in files}

    # ----------------------------------------------------------------------------------------------------- follow

    def _follow(self) -> Iterator[bytes]:
        """Yield event lines until the worker has ended or is lost."""
        last_heard, pause, is_disconnected = time.monotonic(), 0.1, False
        while self._code is None:
            problem = f"{self.link.name}: the connection ended"
            try:
                if is_disconnected:
                    self._redial(pause, last_heard + self.timeouts.silence)
                for record in self._records():
                    last_heard, pause, self.is_connected = time.monotonic(), 0.1, True
                    if is_disconnected:
                        is_disconnected = False
                        change = self._send_new_rendezvous(self._rendezvous.update)
                        yield self._note(f"{self.link.name}: reconnected{change}")
                    line = self.take(record)
                    if line:
                        yield line
                    if self._code is not None:
                        self._raise_broken()
                        return
            except ValidationError as error:
                self._lose(f"its agent sent an invalid message ({first_problem(error)})")
                return
            except (MusterError, OSError, ValueError) as error:
                problem = str(error) or "it does not answer"
            self._raise_broken()
            # A worker that is no longer wanted is ended by its lease where we cannot reach it.
            timeout = self.timeouts.silence if self.is_unwanted else self.timeouts.give_up
            if time.monotonic() - last_heard > timeout and (self.is_unwanted or not self.is_cut_off()):
                self._lose(f"{UNREACHED} for {span_text(timeout)}")
                return
            self.is_connected = False
            if not is_disconnected:
                is_disconnected = True
                yield self._note(f"{problem}; it may train on meanwhile; reconnecting")
            pause = min(2 * pause, 2.0)

    def _redial(self, pause: float, given_up_at: float) -> None:
        """Dial the machine again after a pause; that may take long, and is not waited for after ``given_up_at`` where
        the worker is not wanted any more.

        Raises:
            MusterError, OSError: it cannot be reached.
        """
        dialled: Future[None] = Future()

        def dial() -> None:
            time.sleep(pause)
            try:
                self.link.connection()
            except Exception as error:  # noqa: BLE001 - it is raised in the thread that waits
                dialled.set_exception(error)
            else:
                dialled.set_result(None)

        threading.Thread(target=dial, daemon=True).start()
        while wait([dialled], _POLL).not_done:
            if self.is_unwanted and time.monotonic() > given_up_at:
                raise TimeoutError
        dialled.result()

    def _raise_broken(self) -> None:
        """Raise the reason why it was killed, where it had no route to the coordinator.

        Raises:
            MusterError: it had none.
        """
        if self._broken is not None:
            raise self._broken

    def _note(self, message: str) -> bytes:
        return to_line(WarningEvent(member=self.assignment.rank, message=message)).encode()

    def _records(self) -> Iterator[Record]:
        """Attach to the agent and yield its records.

        Raises:
            SshError, TimeoutError, ValueError: the connection is lost, silent, or not one to an agent.
            ValidationError: the agent sent an invalid record.
        """
        with contextlib.closing(self.link.stream(Attach(*self._folder, self._seen, self.timeouts.lease))) as process:
            greeting = process.read_line(self.timeouts.silence)
            if not greeting:  # ended before it was attached
                return
            hello = AgentHello.parse(greeting)
            if hello.gone:
                self._lose("its agent is gone")
                with contextlib.suppress(SshError):
                    self.link.ask(Forget(*self._folder))
                return
            if self.adopted is not None and self.attached == -math.inf:
                self._earlier_commands = hello.commands
            self.attached = time.monotonic()
            stop = threading.Event()
            writer = threading.Thread(target=self._write, args=(process, hello.commands, stop), daemon=True)
            writer.start()
            try:
                while (line := process.read_line(self.timeouts.silence)).endswith(b"\n"):  # else it was cut off
                    yield Record.model_validate_json(line)
            finally:
                stop.set()
                with self._changed:
                    self._changed.notify_all()

    def take(self, record: Record) -> bytes:
        """Process one record; return the event line in it, if any."""
        if record.seq <= self._seen:
            return b""
        self._seen = record.seq
        if record.log:
            self._keep_log(record.log.encode())
        elif record.pid is not None:
            self.pid = record.pid
        elif record.end is not None:
            self._code, self.end_reason = LOST if record.why else record.end, record.why
        return NumberedLine.of(record.event, record.seq)

    def _keep_log(self, text: bytes) -> None:
        if self._logged > self.log_budget:
            return
        self._logged += len(text)
        if self._logged > self.log_budget:
            text = f"... more than {bytes_text(self.log_budget)} of log: the rest is not kept\n".encode()
        with contextlib.suppress(ValueError, OSError):  # closed: the run is over
            self.log.write(text)
            self.log.flush()

    def _lose(self, reason: str) -> None:
        if self._code is None:
            self._code, self.end_reason = LOST, reason

    # ------------------------------------------------------------------------------------------------------ speak

    def _post(self, command: dict[str, Any]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def _write(self, process: Process, carried_out: int, stop: threading.Event) -> None:
        """Send the commands that the agent has not carried out yet, and beats between them."""
        earlier = self._earlier_commands
        with contextlib.suppress(SshError):
            while not stop.is_set():
                with self._changed:
                    if earlier + len(self._commands) <= carried_out:
                        self._changed.wait(self.timeouts.beat)
                    fresh = [{"n": n, **c} for n, c in enumerate(self._commands, earlier + 1) if n > carried_out]
                messages = fresh or [{"beat": 1, "grace": self.timeouts.grace, "recorded": self._recorded}]
                process.write(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
                carried_out += len(fresh)

    # -------------------------------------------------------------------------------------------------------- end

    def _dismiss_agent(self) -> None:
        """Dismiss the agent; where it cannot be reached, it ends with its lease."""
        if self._code == LOST:
            return
        self._post({"bye": True, "keep": not self._over})
        self._drain_records()

    def _keep_agent_alive(self, keep: Future[bool]) -> None:
        """Renew the lease until the run's outcome is known: a failed run is resumed from the files on the machine."""
        keep.add_done_callback(lambda decided: self._post({"bye": True, "keep": decided.result()}))
        self._drain_records()
        while not keep.done():  # the connection broke
            time.sleep(_POLL)
            self._drain_records()
        self._agent_ended.set()

    @property
    def _over(self) -> bool:
        """Whether its folder is not needed any more."""
        ends = (ExitCode.DONE,) if self.assignment.resumes else (ExitCode.DONE, ExitCode.RUN_FAILED, ExitCode.STOPPED)
        return self._code in ends

    def _drain_records(self) -> None:
        """Read records until the agent ends or is gone."""
        with contextlib.suppress(MusterError, OSError, ValueError):
            for _ in self._records():
                continue
