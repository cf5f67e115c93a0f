"""Ending a run early: signals, orders to its members, and the remaining snapshot. Imports no torch."""

from __future__ import annotations

import _thread
import contextlib
import math
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from training.records.events import AnswerEvent, Event, MemberEvent, SnapshotEvent, StepEvent, SyncEvent
from training.run.group_orders import GroupOrders
from training.run.members.membership import Membership
from training.run.orders import OrderAction, OrderEnd
from training.run.outcome import merged_step, newest_complete_step, progress_text
from training.strategies.registry import segment_steps_of, strategy_class

ANSWER_WITHIN = 30.0
"""Seconds to wait for a member's answer to an order: it may have to reconnect."""
LEAST_PATIENCE = 120.0
"""Seconds without any sign of progress after which members that are to stop are called stuck, at least ..."""
PATIENT_STEPS = 20
"""... this many steps' time ..."""
PATIENT_SNAPSHOTS = 10
"""... and this many times what the longest snapshot took."""
FIRST_STEP_PATIENCE = 900.0
"""Patience while no step has been measured: the first one may compile the model."""
MOST_PATIENCE = 3600.0
"""Upper limit, whatever pace a member reports."""
FAILED_GRACE = 4.0
"""Seconds that the other members have to end when one has failed."""
SCRIPT_GRACE = 30.0
"""Seconds that a launched script has to save its work when it is stopped."""
_LONGEST_END = 900.0
_WINDOW = 16
_MOST_INTERVALS = 20
"""Synchronisations that a slow member may be behind the others."""
_LEAST_SPREAD = 1000
"""Steps that it may be in any case."""
_LOOK, _STALL = 0.2, 5.0
"""Seconds between two checks of members that are to stop, and after which this process itself must have been
stopped."""
ONE_PRESS = 1.0
"""Seconds within which signals count as one: our parent may pass on one that the terminal has sent us already."""
STOPPING = "stopping at the next step that all reach, with a snapshot (press again to end at once, without one)"


class OrderDispatcher:
    """Gives orders to all members, each after the same step. Any thread may call it, but no signal handler."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self.stop_step: float = math.inf
        """The step after which all stop at the latest; infinite: not chosen yet."""
        self._lock = threading.Lock()
        settings = members.plan.profile.strategy
        # This process runs no user code, so it does not know the schedule of a user's own strategy.
        interval = 1 if settings.user_strategy else strategy_class(settings.strategy).sync_schedule(settings).interval
        spread = max(_LEAST_SPREAD, _MOST_INTERVALS * interval)
        self._segment_steps = segment_steps_of(settings)
        self._group = GroupOrders(
            lambda: members.active_ranks, self._send, lambda *end: self._ended.append(end), spread
        )
        self._ended: list[tuple[int, int, str]] = []
        self._callbacks: dict[int, OrderEnd] = {}

    def count_from(self, number: int) -> None:
        """Number the orders from here on: members may still answer those of a killed supervisor."""
        self._group.count = number

    def give(self, action: OrderAction, on_done: OrderEnd | None = None, **words: Any) -> None:
        """Give an order; ``on_done`` is called when all have carried it out."""
        with self._turn() as group:
            number = group.give(action, **words)
            if on_done is not None:
                self._callbacks[number] = on_done

    def receive_answer(self, rank: int, answer: AnswerEvent) -> None:
        """Take a member's answer."""
        with self._turn() as group:
            group.receive_answer(rank, answer)

    def look(self) -> None:
        """Check the orders after a member has gone or need not be waited for."""
        with self._turn() as group:
            group.look()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[GroupOrders]:
        """Use the group's orders under the lock; then call the callbacks of finished ones without it: they may give the
        next."""
        with self._lock:
            yield self._group
            ended, self._ended = self._ended, []
            calls = [(self._callbacks.pop(number, None), step, failures) for number, step, failures in ended]
        for callback, step, failures in calls:
            if callback is not None:
                callback(step, failures)

    def _send(self, message: dict[str, Any]) -> None:
        self._members.send(message)
        if message["command"] == "stop":
            self.stop_step = message["at_step"] + self._segment_steps
        if message["command"] == "meet":
            timer = threading.Timer(ANSWER_WITHIN, self._overdue, (message["order"],))
            timer.daemon = True
            timer.start()

    def _overdue(self, number: int) -> None:
        with self._turn() as group:
            group.stop_waiting(number)


@dataclass
class ProgressMonitor:
    """Pace and snapshots of a run, from all its events."""

    newest_step: int = 0
    last_step: float = math.inf
    """The step at which all are to stop: steps beyond it are no progress towards the end."""
    _steps: dict[int, deque[float]] = field(default_factory=dict)
    _snapshots: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)
    """Names of the lost members."""
    _taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Newest step of each member, and newest one that the others have a share of."""
    _longest_snapshot: float = 0.0
    least_patience: float = LEAST_PATIENCE
    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""

    def __post_init__(self) -> None:
        self.note_progress()

    def __call__(self, event: Event) -> None:
        rank = -1 if event.member is None else event.member
        match event:
            case StepEvent():
                self.newest_step = max(self.newest_step, event.step)
                self._taken[rank] = event.step, merged_step(event, self._taken.get(rank, (0, 0))[1])
                self._steps.setdefault(rank, deque(maxlen=_WINDOW)).append(event.seconds)
                if event.step <= self.last_step:
                    self.note_progress()
            case SnapshotEvent():
                if event.step > self._snapshots.get(rank, (-1,))[0]:
                    self.note_progress()
                self._snapshots[rank] = (event.step, event.live)
                self._longest_snapshot = max(self._longest_snapshot, event.seconds)

            case SyncEvent():
                self._taken[rank] = self._taken.get(rank, (0, 0))[0], event.step
            case MemberEvent(status="lost" | "failed"):
                self._lost[rank] = event.name or f"member {rank}"
            case MemberEvent(status="joined" | "ready"):
                self._lost.pop(rank, None)

    def note_progress(self) -> None:
        """Record a sign of progress."""
        self._progressed_at = self.clock()

    @property
    def pace(self) -> float | None:
        """Seconds of a step: the median of each member's recent ones, of the slowest member."""
        return max((statistics.median(tuple(steps)) for steps in tuple(self._steps.values())), default=None)

    @property
    def patience(self) -> float:
        """Seconds without a sign after which a member that is to stop is stuck."""
        if self.pace is None:
            return FIRST_STEP_PATIENCE
        usual = max(PATIENT_STEPS * self.pace, PATIENT_SNAPSHOTS * self._longest_snapshot)
        return min(max(self.least_patience, usual), MOST_PATIENCE)

    @property
    def time_to_end(self) -> float:
        """Seconds, with a margin, in which a member finishes its step and writes a snapshot."""
        return min(_LONGEST_END, 3 * ((self.pace or 0.0) + self._longest_snapshot))

    @property
    def silence(self) -> float:
        """Seconds since the last sign."""
        return self.clock() - self._progressed_at

    @property
    def resumable_step(self) -> int | None:
        """The step from which the run can be resumed."""
        return newest_complete_step(self._snapshots, self._lost)

    @property
    def metrics(self) -> dict[str, int | None]:
        """Figures on the progress that a stopped run keeps and loses."""
        return {"kept_step": self.resumable_step, "lost_steps": max(0, self.newest_step - (self.resumable_step or 0))}

    @property
    def summary(self) -> str:
        """A sentence on the progress that a stopped run keeps and loses."""
        unmerged = {
            name: taken - merged
            for rank, name in self._lost.items()
            for taken, merged in [self._taken.get(rank, (0, 0))]
        }
        return progress_text(self.resumable_step, self.newest_step, unmerged)


class Stopping:
    """Ends all members early. They have the time that they need: only members without any progress are killed."""

    def __init__(self, members: Membership, orders: OrderDispatcher, progress: ProgressMonitor) -> None:
        self._members, self._orders, self._progress = members, orders, progress
        self._over = threading.Event()
        self.reason = ""
        """Why all members are to end; empty: they are not."""

    def stop(self, reason: str, begun: bool) -> None:
        """Stop all members after the first step that all can reach, with snapshots; a signal's handler may call it.

        Args:
            begun: whether there is progress to save.
        """
        if not self.reason:
            self.reason = reason
            _in_thread(self._stop if begun else self._members.kill)

    def end(self, reason: str, grace: float) -> None:
        """End all within ``grace`` seconds. They write no snapshot: the state may have caused the failure, and a
        launched script saves its own files."""
        if not self.reason:
            self.reason = reason
            self._members.send({"command": "stop", "reason": reason, "snapshot": False})
            _in_thread(lambda: self._kill_in(grace))

    def keep_and_end(self, reason: str) -> None:
        """End all members with snapshots though nothing can be recorded any more; who takes too long is killed."""
        self.reason = self.reason or reason
        grace = max(SCRIPT_GRACE, self._progress.time_to_end)
        self._members.send({"command": "stop", "reason": reason, "within": grace})
        _in_thread(lambda: self._kill_in(grace))

    def note_end(self) -> None:
        """Record that a member has ended."""
        self._progress.note_progress()
        self._orders.look()
        if self._members.none_can_return() or (self.reason and not self._members.active_ranks):
            self._members.kill()

    def over(self) -> None:
        """Stop watching the members."""
        self._over.set()

    def _stop(self) -> None:
        self._orders.give("stop", reason=self.reason)
        self._progress.note_progress()
        looked_at = self._progress.clock()
        while not self._over.wait(_LOOK):
            before, looked_at = looked_at, self._progress.clock()
            if looked_at - before > _STALL:  # this process stood still: events of the members are still unread
                self._progress.note_progress()
            self._progress.last_step = self._orders.stop_step
            if self._progress.silence > self._progress.patience:
                return self._members.kill()

    def _kill_in(self, seconds: float) -> None:
        if not self._over.wait(seconds):
            self._members.kill()


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="stopping", daemon=True).start()


class Stoppable(Protocol):
    """A run; :class:`training.run.run_controller.RunController` is one."""

    def request_stop(self, message: str) -> None: ...

    def kill(self) -> None: ...


class StopSignals:
    """Turns signals into a stop of the run; a second one ends everything at once."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._run: Stoppable | None = None
        self._asked = 0
        self._first_signal_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self._asked and now - self._first_signal_at < ONE_PRESS:
            return
        self._first_signal_at = self._first_signal_at if self._asked else now
        self._asked += 1
        if self._run is not None:
            self._act(self._run)

    def watch(self, run: Stoppable) -> None:
        """Direct signals to the started run, also one that has arrived already."""
        self._run = run
        if self._asked:
            self._act(run)

    def _act(self, run: Stoppable) -> None:
        if self._asked > 1:
            return run.kill()
        say_beside(self._say, STOPPING)
        run.request_stop("stopped by the user")


def say_beside(say: Callable[[str], None], text: str) -> None:
    """Say something from a signal's handler, in a thread: the interrupted code may be printing, and a stream takes no
    second call of one thread. (``threading.Thread`` would take a lock that the interrupted code may hold.)"""
    _thread.start_new_thread(say, (text,))


@contextlib.contextmanager
def stopped_by(signals: Sequence[int], say: Callable[[str], None]) -> Iterator[StopSignals]:
    """Let signals stop the run that :meth:`StopSignals.watch` is given; only the main thread receives any."""
    stop = StopSignals(say)
    handled = signals if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
