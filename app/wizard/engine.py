"""The guided set-up at work: holds the state, asks the services in threads, and tells whoever draws it.

::

    wizard = Wizard(services)
    wizard.subscribe(draw)          # called after each change, from any thread; read wizard.state there
    wizard.do(Next())
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from app.wizard import actions as do
from app.wizard.actions import Action
from app.wizard.observations import Begun, Done, Failed, Kind, LaunchSeen, Observation, Sighted, Task, Told, WatchFailed
from app.wizard.services import JobAnswers, Request, Services, Sight, Watch
from app.wizard.slots import stamp, wanted
from app.wizard.state import AccessRow, Launch, Status, WizardState
from app.wizard.steps import Step
from app.wizard.transitions import apply, begin
from profiles.errors import MusterError

Listener = Callable[[], None]
RETRY_EVERY = 3.0
"""Seconds between two looks at a machine that does not let us in, while that is shown."""
SLOW_RETRY_EVERY = 10.0
"""After many refused log-ins: SSH servers lock out who knocks too often."""
_MANY = 10


class Wizard:
    """One set-up. Its methods may be called from any thread, and none of them blocks.

    Args:
        services: the machines, or their stand-ins.
        profile: begin at the Plan of this profile; empty: begin at Home.
    """

    def __init__(self, services: Services, profile: str = "") -> None:
        self._services = services
        self._state = begin()
        self._told = self._state
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._listeners: list[Listener] = []
        self._running: set[Task] = set()
        self._asked_at: dict[str, float] = {}
        self._watch: Watch | None = None
        self._closed = False
        self._spawn(self._look_out)
        self._spawn(self._retry_for_ever)
        if profile:
            self.do(do.Rerun(profile))
        self._change(None)

    @property
    def state(self) -> WizardState:
        with self._lock:
            return self._state

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called after each change; returns what ends that."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    def do(self, action: Action) -> None:
        """Carry out what a person did."""
        with self._lock:
            before = self._state
            self._change(action)
            self._carry_out(action, before)

    def wait(self, until: Callable[[WizardState], bool], timeout: float) -> bool:
        """Wait until the state fulfils ``until``; return whether it did in time."""
        with self._wake:
            return self._wake.wait_for(lambda: self._closed or until(self._state), timeout) and until(self._state)

    def close(self) -> None:
        """Let go of everything; what still runs is not heard any more. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            watch, self._watch = self._watch, None
            self._listeners.clear()
            self._wake.notify_all()
        if watch is not None:
            watch.close()
        self._services.close()

    # ----------------------------------------------------------------------------------------------------- the state

    def _change(self, change: Action | Observation | None) -> None:
        """Take a change in, begin what the new state needs, and tell the listeners."""
        with self._lock:
            if self._closed:
                return
            if change is not None:
                self._state = apply(self._state, change)
            for task in wanted(self._state):
                if task not in self._running:
                    self._start(task)
            listeners = () if self._state is self._told else tuple(self._listeners)
            self._told = self._state
            self._wake.notify_all()
        for listener in listeners:
            listener()

    def _start(self, task: Task, quiet: bool = False, password: str = "") -> None:
        self._running.add(task)
        if not quiet:
            self._state = apply(self._state, Begun(task))
        state = self._state
        self._spawn(lambda: self._work(task, state, password))

    def _spawn(self, call: Callable[[], None]) -> None:
        threading.Thread(target=call, name="wizard", daemon=True).start()

    def _work(self, task: Task, state: WizardState, password: str) -> None:
        try:
            outcome: Observation = Done(task, self._ask(task, state, password))
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the row shows it, the set-up goes on
            outcome = Failed(task, *_words(error))
        with self._lock:
            self._running.discard(task)
            self._asked_at[task.key] = time.monotonic()
        self._change(outcome)

    # ------------------------------------------------------------------------------------------------ what is asked for

    def _ask(self, task: Task, state: WizardState, password: str) -> Any:
        services, kind = self._services, task.kind
        job = JobAnswers(state.answers.profile, state.answers.options)
        tell = self._tell(task)
        if kind is Kind.HOME:
            return services.home()
        if kind is Kind.DOCTOR:
            return tuple(services.doctor())
        if kind is Kind.SAVED_MACHINES:
            return tuple(services.saved_machines(task.key))
        if kind in (Kind.ACCESS, Kind.INSTALL_KEY):
            return self._ask_access(task, state, password)
        if kind is Kind.CHECKS:
            return tuple(services.examine(state.members, job))
        if kind is Kind.REPAIR:
            keys = {row.key for row in state.checks if row.status is Status.WORKING}
            services.repair([row for row in state.members if row.key in keys], job, task.key, tell)
            return None
        if kind is Kind.LINKS:
            return tuple(services.measure_links(state.members, job, tell))
        if kind is Kind.JOB:
            return services.job(job)
        if kind is Kind.DATA:
            return services.look_at_data(job)
        if kind is Kind.FITS:
            return tuple(services.fits(state.members, job))
        return self._ask_about_the_way(task, state, tell)

    def _ask_access(self, task: Task, state: WizardState, password: str) -> AccessRow | None:
        machine = next((row for row in state.picked if row.key == task.key), None)
        if machine is None:
            return None
        trusted = _trusted(state)
        if task.kind is Kind.INSTALL_KEY:
            return self._services.install_key(machine, password, trusted)
        return self._services.check_access(machine, trusted)

    def _ask_about_the_way(self, task: Task, state: WizardState, tell: Callable[[str], None]) -> Any:
        services, kind = self._services, task.kind
        request = request_of(state)
        if kind is Kind.FORECAST:
            return services.forecast(request, tell)
        if kind is Kind.INTERVAL:
            chosen = state.chosen
            assert chosen is not None
            steps = state.answers.interval or chosen.best_interval
            return services.with_interval(state.strategy.planning, chosen.index, steps)
        if kind is Kind.PLAN:
            return services.plan(request)
        if kind is Kind.SAVE:
            return services.save(request)

        def see(launch: Launch) -> None:
            self._change(LaunchSeen(launch))

        return str(services.launch(request, see))

    def _tell(self, task: Task) -> Callable[[str], None]:
        return lambda line: self._change(Told(task, line))

    def _carry_out(self, action: Action, before: WizardState) -> None:
        """Begin what an action asks for by itself, where the state took it."""
        state = self._state
        if self._closed:
            return
        if isinstance(action, do.Doctor):
            self._order(Kind.DOCTOR)
        elif isinstance(action, do.Rerun):
            self._order(Kind.SAVED_MACHINES, action.profile)
        elif isinstance(action, do.AddMachine) and state.answers.typed != before.answers.typed:
            self._add(state.answers.typed[-1])
        elif isinstance(action, do.RemoveMachine) and state.answers.typed != before.answers.typed:
            self._remove(action.text)
        elif isinstance(action, do.GivePassword) and state.access != before.access:
            self._order(Kind.INSTALL_KEY, action.key, action.password)
        elif isinstance(action, do.Fix | do.FixAll) and state.checks != before.checks:
            self._order(Kind.REPAIR, action.check if isinstance(action, do.Fix) else "")
        elif isinstance(action, do.SaveOnly) and not state.notice:
            self._order(Kind.SAVE)
        elif isinstance(action, do.Confirm | do.Retry) and state.launch is not before.launch:
            self._order(Kind.LAUNCH)

    def _order(self, kind: Kind, key: str = "", password: str = "") -> None:
        task = Task(kind, key, stamp(self._state, kind, key))
        if task not in self._running:
            self._start(task, password=password)
        self._change(None)

    # -------------------------------------------------------------------------------------------------------- look-out

    def _look_out(self) -> None:
        try:
            watch = self._services.watch(self._see)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the list says it, typing still works
            self._change(WatchFailed(*_words(error)))
            return
        with self._lock:
            if not self._closed:
                self._watch = watch
                typed = self._state.answers.typed
        if self._closed:
            watch.close()
            return
        for text in typed:
            self._add_quietly(watch, text)

    def _see(self, sight: Sight) -> None:
        self._change(Sighted(sight))

    def _add(self, text: str) -> None:
        watch = self._watch
        if watch is not None:
            self._spawn(lambda: self._add_quietly(watch, text))

    def _remove(self, text: str) -> None:
        watch = self._watch
        if watch is not None:
            self._spawn(lambda: watch.remove(text))

    def _add_quietly(self, watch: Watch, text: str) -> None:
        with contextlib.suppress(MusterError):  # its row is there; Access says what is wrong with it
            watch.add(text)

    # --------------------------------------------------------------------------------------------------------- retries

    def _retry_for_ever(self) -> None:
        """Look again at machines that do not let us in, while that is shown: mending one turns its row green."""
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
                self._start(Task(Kind.ACCESS, due[1], stamp(self._state, Kind.ACCESS, due[1])), quiet=True)

    def _next_retry(self) -> tuple[float, str] | None:
        """Return when and where to look again next; ``None`` while there is nothing to look at."""
        if self._state.step is not Step.ACCESS:
            return None
        busy = {task.key for task in self._running if task.kind in (Kind.ACCESS, Kind.INSTALL_KEY)}
        rows = (row for row in self._state.access if row.key not in busy and _to_be_retried(row))
        return min(((self._asked_at.get(row.key, 0.0) + _pause(row), row.key) for row in rows), default=None)


def _words(error: Exception) -> tuple[str, str]:
    """Return what went wrong, and what to do."""
    if isinstance(error, MusterError):
        return error.message, error.hint
    return f"unexpected: {type(error).__name__}: {error}", "please report this"


def _to_be_retried(row: AccessRow) -> bool:
    return row.status in (Status.FAILED, Status.WARNING)


def _pause(row: AccessRow) -> float:
    refused = any(name == "login" and status is Status.FAILED for name, status in row.stages)
    return SLOW_RETRY_EVERY if refused and row.attempts > _MANY else RETRY_EVERY


def _trusted(state: WizardState) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fingerprint for _, fingerprint in state.answers.trusted))


def request_of(state: WizardState) -> Request:
    """Return everything that a plan for these answers is made of."""
    answers = state.answers
    return Request(
        machines=state.members,
        job=JobAnswers(answers.profile, answers.options),
        preference=answers.preference,
        chosen=state.chosen,
        save_as=answers.save_as,
        trusted=_trusted(state),
        planning=state.strategy.planning,
        measure=state.strategy.measure,
    )
