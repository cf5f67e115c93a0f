"""Runs the guided set-up: holds the state, calls the services in threads, and notifies listeners.

::

    wizard = Wizard(services)
    wizard.subscribe(draw)          # called after each change, from any thread; read wizard.state there
    wizard.do(go_on())
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from app.console import command_line, say, visible
from app.wizard.services.services import Services
from app.wizard.state.actions import begin_with_hosts, install_key, rerun
from app.wizard.state.dependencies import SENT, apply, begin, inputs, logins_alike, tasks_to_start
from app.wizard.state.observations import begun, done, failed, launch_seen, log_line, sighted, watch_failed
from app.wizard.state.records import Access, CandidateRow, ItemStatus, MachineRow
from app.wizard.state.state import Action, ServiceTask, Step, TaskKind, Transition, WizardState
from profiles.errors import MusterError, counted

if TYPE_CHECKING:  # loads SSH, which the first screen does without
    from app.wizard.services.discovery_watch import DiscoveryWatch
    from distributed.joining.share_client import SharedOffer
    from distributed.ssh.access import AccessReport

Listener = Callable[[], None]
RETRY_EVERY = 3.0
"""Seconds between two attempts to log in to a machine that refused, while that step is shown."""
SLOW_RETRY_EVERY = 10.0
"""The same after many refused logins: SSH servers lock out clients that try too often."""
_MANY = 10
_ASKED = 200


@dataclass
class TaskRecord:
    """One request to the services."""

    task: ServiceTask
    at: float
    """Unix time of the request."""
    outcome: str = ""
    """``ok``, or the error; empty while in progress."""


class Wizard:
    """One set-up. Its methods may be called from any thread, and none of them blocks.

    Args:
        profile: start at the Plan step of this profile; empty: at Home, or with the machines of the services' hosts.
        retry_every: seconds between two attempts to log in to a machine that refused.
        waits: start no work before :meth:`start`.
    """

    def __init__(
        self, services: Services, profile: str = "", retry_every: float = RETRY_EVERY, waits: bool = False
    ) -> None:
        self._services = services
        self._retry_every = retry_every
        self._state = begin()
        self._published = self._state
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._listeners: list[Listener] = []
        self._running: set[ServiceTask] = set()
        self._asked_at: dict[str, float] = {}
        self._attempts: Counter[str] = Counter()
        self._passwords: dict[str, str] = {}
        """Passwords by machine key, each removed when it is used."""
        self._accepted: dict[str, str] = {}
        """Passwords that a machine has accepted, by user: offered for others until the run starts, never written."""
        self._looked_for: tuple[str, ...] = ()
        self._looking = threading.Lock()
        """Held while typed machines are passed to the watch, so that the latest list is passed last."""
        self._watch: DiscoveryWatch | None = None
        self._asked: deque[TaskRecord] = deque(maxlen=_ASKED)
        self._closed, self._started = False, False
        if profile or services.hosts is not None:
            self.do(rerun(profile) if profile else begin_with_hosts())
        if not waits:
            self.start()

    def start(self) -> None:
        """Start the work: the search for machines, and what the state needs. May be called twice."""
        with self._lock:
            if self._started or self._closed:
                return
            self._started = True
        self._spawn(self._discover)
        self._spawn(self._retry_for_ever)
        self._change(None)

    @property
    def state(self) -> WizardState:
        with self._lock:
            return self._state

    def asked_for(self) -> list[TaskRecord]:
        """Return the requests to the services, oldest first, without automatic retries."""
        with self._lock:
            return list(self._asked)

    def close_and_report(self) -> None:
        """Close, and print what this set-up has left on other machines."""
        self.close()
        if behind := self.left_behind():
            say(visible(behind))

    def left_behind(self) -> str:
        """Return what this set-up has left on other machines, and how it is removed; empty: nothing."""
        with self._lock:
            installed = {one.task.key for one in self._asked
                         if one.task.kind is TaskKind.INSTALL_KEY and one.outcome == "ok"}  # fmt: skip
            rows = [row for row in self._state.listed if row.key in installed]
            logins = [row.reached_as(dict(self._state.answers.users).get(row.key, "")).entry.login for row in rows]
        if not rows or not self._services.changes_machines:
            return ""
        removal, names = command_line("machines", "clean", *logins), ", ".join(row.name for row in rows)
        return f"A login key of Muster is installed on {names}; this removes it: {removal}"

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` after each change until the set-up is closed."""
        with self._lock:
            self._listeners.append(listener)

    def do(self, action: Action) -> None:
        """Apply a user action."""
        self._change(action)

    def give_password(self, machine: str, password: str) -> None:
        """Install our SSH key on a machine with a password, which is used once and never stored in the state."""
        with self._lock:
            self._passwords[machine] = password
            self._change(install_key(machine))
            if self._state.notice:  # the action was refused
                self._passwords.pop(machine, None)

    def password_offer(self, row: Access) -> tuple[Access, ...]:
        """Return the machines that wait for a password of the user of ``row``; empty without one to offer for it."""
        report = row.report
        if report is None or report.cause == "password_refused":
            return ()
        with self._lock:
            return logins_alike(self._state, row) if report.user in self._accepted else ()

    def answer_offer(self, alike: Sequence[Access], agreed: bool) -> None:
        """Install our SSH key on these machines with the password that another one has accepted, or forget it."""
        for row in alike:
            user = row.report.user if row.report is not None else ""
            password = self._accepted.get(user, "") if agreed else self._accepted.pop(user, "")
            if agreed and password:
                self.give_password(row.key, password)

    def wait(self, until: Callable[[WizardState], bool], timeout: float) -> bool:
        """Wait until the state fulfils ``until``; return whether it did within ``timeout`` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._closed or until(self._state), timeout) and until(self._state)

    def share(self) -> SharedOffer:
        """Open a code with which a machine joins; blocks while the door starts.

        Raises:
            MusterError: none can be opened.
        """
        return self._services.share()

    def end_asking(self) -> None:
        """Let asking the addresses of a network end with the answers so far."""
        self._services.end_asking()

    def skip_measuring(self) -> None:
        """Let measuring the machines end with the figures so far, and predict with them."""
        self._services.skip_measuring()

    def close(self) -> None:
        """Release all resources; results of calls still running are ignored. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            watch, self._watch = self._watch, None
            self._listeners.clear()
            self._passwords.clear()
            self._accepted.clear()
            self._wake.notify_all()
        if watch is not None:
            watch.close()
        self._services.close()

    # ----------------------------------------------------------------------------------------------------- the state

    def _change(self, change: Transition | None) -> None:
        """Apply a change, start the tasks that the new state needs, and notify the listeners."""
        with self._lock:
            if self._closed:
                return
            if change is not None:
                self._state = apply(self._state, change)
            if self._state.step is Step.LAUNCH:
                self._accepted.clear()
            for task in tasks_to_start(self._state) if self._started else ():
                if task not in self._running:
                    self._start_task(task)
            self._look_for_typed()
            listeners = () if self._state is self._published else tuple(self._listeners)
            self._published = self._state
            self._wake.notify_all()
        for listener in listeners:
            listener()

    def _start_task(self, task: ServiceTask, quiet: bool = False) -> None:
        self._running.add(task)
        if not quiet:
            self._state = apply(self._state, begun(task))
        state, asked = self._state, TaskRecord(task, time.time())
        if not quiet:
            self._asked.append(asked)
        self._spawn(lambda: self._work(asked, state))

    def _spawn(self, call: Callable[[], None]) -> None:
        threading.Thread(target=call, name="wizard", daemon=True).start()

    def _work(self, asked: TaskRecord, state: WizardState) -> None:
        task = asked.task
        try:
            result = self._ask(task, state)
            outcome: Transition = done(task, result)
            asked.outcome = _problem_in(result) or "ok"
        except Exception as error:  # noqa: BLE001 - thread boundary: the row shows the error, the set-up continues
            outcome = _failure(task, error)
            asked.outcome = _words(error)[0]
        with self._lock:
            self._running.discard(task)
            self._asked_at[task.key] = time.monotonic()
            self._attempts[task.key] += task.kind is TaskKind.ACCESS
        try:
            self._change(outcome)
        except Exception as error:  # noqa: BLE001 - an unusable result counts as failed, or its task would never end
            self._change(_failure(task, error))

    # ---------------------------------------------------------------------------------------------------- service calls

    def _ask(self, task: ServiceTask, state: WizardState) -> Any:
        services, members, job = self._services, state.members, state.answers.job
        machines, request = {row.key: row for row in state.picked}, state.request

        def tell(line: str) -> None:
            self._change(log_line(task, line))

        def moved() -> CandidateRow:
            candidate, steps = cast("tuple[CandidateRow, int]", task.inputs)
            return services.with_interval(request.planning, candidate.index, steps)

        calls: Mapping[TaskKind, Callable[[], Any]] = {
            TaskKind.HOME: services.home,
            TaskKind.DOCTOR: lambda: tuple(services.doctor()),
            TaskKind.SAVED_MACHINES: lambda: tuple(services.saved_machines(task.key)),
            TaskKind.NEIGHBOURS: lambda: services.neighbours(cast("tuple[str, ...]", task.inputs or ())),
            TaskKind.ACCESS: lambda: services.check_access(machines[task.key], request.answers.fingerprints),
            TaskKind.APPROVAL: lambda: services.approve(machines[task.key]),
            TaskKind.INSTALL_KEY: lambda: self._install_key(machines[task.key], request.answers.fingerprints),
            TaskKind.CHECKS: lambda: services.examine(members, job),
            TaskKind.REPAIR: lambda: services.repair(
                [row for row in members if row.key in cast("tuple[str, ...]", task.inputs)], job, tell, task.key == SENT
            ),
            TaskKind.LINKS: lambda: tuple(services.measure_links(members, job, tell)),
            TaskKind.JOB: lambda: services.job(job),
            TaskKind.DATA: lambda: services.look_at_data(job),
            TaskKind.SELECTING: lambda: services.select_readable(job, tell),
            TaskKind.FITS: lambda: tuple(services.fits(members, job)),
            TaskKind.FORECAST: lambda: services.forecast(request, tell),
            TaskKind.INTERVAL: moved,
            TaskKind.PLAN: lambda: services.plan(request),
            TaskKind.SAVE: lambda: services.save(request),
            TaskKind.LAUNCH: lambda: services.launch(request, lambda launch: self._change(launch_seen(launch)), tell),
        }
        return calls[task.kind]()

    def _install_key(self, machine: MachineRow, fingerprints: Sequence[str]) -> AccessReport:
        password = self._passwords.pop(machine.key, "")
        report = self._services.install_key(machine, password, fingerprints)
        with self._lock:
            if report.ok and not self._closed:
                self._accepted[report.user] = password
        return report

    # ------------------------------------------------------------------------------------------------------- discovery

    def _discover(self) -> None:
        try:
            watch = self._services.watch(lambda seen: self._change(sighted(seen)))
        except Exception as error:  # noqa: BLE001 - thread boundary: the list shows the error, typing still works
            self._change(watch_failed(*_words(error)))
            return
        with self._lock:
            closed = self._closed
            self._watch = None if closed else watch
        if closed:
            watch.close()
        self._change(None)

    def _look_for_typed(self) -> None:
        watch, typed = self._watch, self._state.answers.typed
        if watch is None or typed == self._looked_for:
            return
        self._looked_for = typed

        def look() -> None:
            with self._looking:
                watch.look_for(self.state.answers.typed)

        self._spawn(look)

    # --------------------------------------------------------------------------------------------------------- retries

    def _retry_for_ever(self) -> None:
        """Retry refused logins while their step is shown, so that a fixed machine's row turns green."""
        with self._wake:
            while not self._closed:
                due = self._next_retry()
                if due is None:
                    self._wake.wait()
                    continue
                delay = due[0] - time.monotonic()
                if delay > 0:
                    self._wake.wait(delay)
                    continue
                self._start_task(
                    ServiceTask(TaskKind.ACCESS, due[1], inputs(self._state, TaskKind.ACCESS, due[1])), quiet=True
                )

    def _next_retry(self) -> tuple[float, str] | None:
        """Return the time and key of the next retry; ``None`` if there is none."""
        if self._state.step is not Step.ACCESS:
            return None
        busy = {task.key for task in self._running if task.kind in (TaskKind.ACCESS, TaskKind.INSTALL_KEY)}
        rows = [row for row in self._state.access if row.key not in busy]
        due = (row for row in rows if row.status in (ItemStatus.FAILED, ItemStatus.WARNING))
        return min(((self._asked_at.get(row.key, 0.0) + self._pause(row), row.key) for row in due), default=None)

    def _pause(self, row: Access) -> float:
        refused = row.report is not None and row.report.failed is not None and row.report.failed.value == "login"
        return SLOW_RETRY_EVERY if refused and self._attempts[row.key] > _MANY else self._retry_every


def _failure(task: ServiceTask, error: Exception) -> Transition:
    return failed(task, *_words(error), error.cause if isinstance(error, MusterError) else "")


def _problem_in(result: Any) -> str:
    """Return the problem that a result tells, as of a refused log-in, of checks, or of one of its rows; empty: none."""
    if isinstance(result, Mapping):
        problems = [one for group in result.values() for one in group if getattr(one, "level", "") == "problem"]
        return counted(len(problems), "problem") if problems else ""
    rows = result if isinstance(result, tuple) else ()
    failed = [row.cause or row.label for row in rows if getattr(row, "status", None) is ItemStatus.FAILED]
    return getattr(result, "problem", "") or "; ".join(failed)


def _words(error: Exception) -> tuple[str, str]:
    if isinstance(error, MusterError):
        return error.message, error.hint
    return f"unexpected: {type(error).__name__}: {error}", "please report this"
