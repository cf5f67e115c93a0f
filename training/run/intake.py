"""Event lines of the coordinator and the members on their way into a run: bounded, checked, and attributed to a source.

Members are identified by their connection, and still not trusted: an invalid line counts against its source, and only
the coordinator may report on other members.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from profiles.quantities import bytes_text
from training.exchange.group.quorum import carrier_of
from training.records.bounded_fields import harmless
from training.records.events import (
    AnswerEvent,
    ElectionEvent,
    ErrorEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    TimingEvent,
    UnknownEvent,
    WarningEvent,
    WaysEvent,
    from_line,
)
from training.run.members.membership import Membership
from training.run.processes import NumberedLine
from training.strategies.registry import segment_steps_of

COORDINATOR = -1
"""The coordinator as a source; a member is its rank."""
SOURCE_CAPACITY = 1 << 20
"""Bytes of one source that may wait; beyond them its pipe, and so its writer, blocks."""
BUDGET = 512 << 20
"""Bytes of one member's events that are kept, some 1.5 million steps; beyond them one line a second."""
STRIKES = 10
"""Invalid lines within :data:`MEMORY` seconds after which a member is given up."""
MEMORY = 600.0
_QUIET = 60.0
"""Seconds from one warning about a member to the next."""
_AHEAD = 100_000
"""Steps by which a member's first step may be ahead of all known ones: lines of others may arrive late."""
CLOCK = 86_400.0
"""Seconds by which a machine's clock may be wrong; beyond them the time of arrival is used."""
_MOST_NAMES = 256
"""Splits, metrics and phases of a start that one member may name: every reader of the run keeps each of them."""
_DECISIVE = (RunEvent, MemberEvent, ElectionEvent, EvaluationEvent, SnapshotEvent, ErrorEvent, RequestEvent)
"""Events on which the course of the run depends, not only a curve."""
_OF_EVERY_DEVICE = (MemberEvent, ErrorEvent, AnswerEvent, RequestEvent)
"""Events that count from each device of a member; all others come once, from the one that speaks for it."""
_OF_ITSELF = ("started", "ready", "joined", "left", "done")


class Inbox:
    """Lines from several sources for one reader. Each source has its own buffer and its turn: none delays another."""

    def __init__(self, capacity: int = SOURCE_CAPACITY) -> None:
        self._capacity = capacity
        self._waiting: dict[int, deque[bytes | None]] = {}
        self._sizes: dict[int, int] = {}
        self._turns: deque[int] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, source: int, line: bytes | None) -> None:
        """Add a line, or ``None``: the source has ended. Blocks while the source's buffer is full."""
        with self._changed:
            self._changed.wait_for(lambda: line is None or self._closed or self.held(source) < self._capacity)
            if self._closed and line is not None:
                return
            waiting = self._waiting.setdefault(source, deque())
            if not waiting:
                self._turns.append(source)
            waiting.append(line)
            self._sizes[source] = self.held(source) + len(line or b"")
            self._changed.notify_all()

    def take(self) -> tuple[int, bytes | None]:
        """Wait for a line and return it; the sources take turns."""
        with self._changed:
            self._changed.wait_for(lambda: self._turns)
            source = self._turns.popleft()
            line = self._waiting[source].popleft()
            self._sizes[source] -= len(line or b"")
            if self._waiting[source]:
                self._turns.append(source)
            self._changed.notify_all()
            return source, line

    def held(self, source: int) -> int:
        """Return how many bytes of a source wait here."""
        return self._sizes.get(source, 0)

    def close(self) -> None:
        """Accept no more lines: blocked writers continue, and their lines are discarded until their source ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _SourceState:
    """What the intake knows of one source."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.joined = False
        """It has joined, or joined again, since its last step."""
        self.names: set[str] = set()
        self.kept_bytes = 0
        self.last_kept: float | None = None
        self.strikes: deque[float] = deque(maxlen=STRIKES)
        self.warned = -_QUIET


class EventIntake:
    """Checks all event lines of one run.

    Args:
        members: of the run, with their names.
        tell: called with a warning.
        give_up: called with the rank of a member that is given up, and the reason.
    """

    def __init__(
        self, members: Membership, tell: Callable[[WarningEvent], None], give_up: Callable[[int, str], None]
    ) -> None:
        self._members = members
        self._tell = tell
        self._give_up = give_up
        self._inbox = Inbox()
        self._sources: dict[int, _SourceState] = {}
        self._warnings: defaultdict[tuple[int, str], Counter[int]] = defaultdict(Counter)
        """How often each device of a member has given a warning, by member and message."""
        self._step = 0
        self._segment_steps = segment_steps_of(members.plan.profile.strategy)
        self.may_pause = False
        """Whether the run has ever been asked to pause."""

    def note_earlier(self, event: Event) -> None:
        """Record an event of an earlier attempt of the run."""
        if isinstance(event, (StepEvent, SnapshotEvent)):
            self._step = max(self._step, event.step)

    def listen(self, source: int, lines: Iterable[bytes]) -> None:
        """Read the lines of a starting member, or of the coordinator, in a thread of its own until they end."""
        self._sources[source] = _SourceState()
        threading.Thread(target=self._read, args=(source, lines), name=f"events-{source}", daemon=True).start()

    def _read(self, source: int, lines: Iterable[bytes]) -> None:
        try:
            for line in lines:
                self._inbox.put(source, line)
        except (ValueError, OSError):  # the stream was closed under us: the process is gone
            pass
        finally:  # whatever went wrong, the reader must not wait for this process for ever
            self._inbox.put(source, None)

    def take(self) -> tuple[int, bytes | None]:
        """Wait for the next line, or the end, of some source."""
        return self._inbox.take()

    def discard(self) -> None:
        """Discard everything that arrives, until all members have ended."""
        while self._members.is_running():
            source, line = self.take()
            if line is None and source >= 0:
                handle = self._members.workers[source]
                handle.exit_code = handle.process.exit_code()

    def close(self) -> None:
        """Discard everything that arrives from now on."""
        self._inbox.close()

    # ------------------------------------------------------------------------------------------------------ checks

    def event(self, source: int, line: bytes) -> Event | None:
        """Return the event of a line, attributed to its source; ``None`` if the line is not valid for this source, or
        another one reports the same."""
        try:
            event = from_line(line)
            if abs(event.time - time.time()) > CLOCK:
                event = event.model_copy(update={"time": time.time()})
            if source == COORDINATOR:
                return self._of_coordinator(event)
            number = line.number if isinstance(line, NumberedLine) else None
            event = self._of_member(source, event.model_copy(update={"line": number}))
            if isinstance(event, WarningEvent):
                return event if self._is_first_to_warn(source, event.message) else None
            return event if isinstance(event, _OF_EVERY_DEVICE) or self._members.speaks(source) else None
        except ValueError as error:
            self._record_strike(source, line, str(error))
            return None

    def _is_first_to_warn(self, source: int, message: str) -> bool:
        """Whether no other device of the member has given a warning as often as this one: each is to be seen once."""
        if not self._members.plan.is_staged:
            return True
        if len(self._warnings) > _MOST_NAMES:
            self._warnings.clear()
        counts = self._warnings[self._members.plan.process(source).member.rank, message]
        counts[source] += 1
        return all(count < counts[source] for device, count in counts.items() if device != source)

    def _of_coordinator(self, event: Event) -> Event | None:
        if isinstance(event, MemberEvent):
            _check(event.member in range(len(self._members.plan.processes)), "an unknown member")
            assert event.member is not None
            return event.model_copy(update={"name": self._members.name(event.member)})
        if isinstance(event, WaysEvent):
            return self._name_peers(event)
        if not isinstance(event, (WarningEvent, ErrorEvent)):
            raise ValueError(f"'{event.kind}' may not come from the coordinator")
        return WarningEvent(time=event.time, message=event.message)

    def _name_peers(self, event: WaysEvent) -> Event | None:
        """Return the paths of a member's first device with the others' names; ``None`` for those of further ones."""
        ranks = range(len(self._members.plan.processes))
        _check(event.member in ranks, "an unknown member")
        assert event.member is not None
        if not self._members.speaks(event.member):
            return None
        named = (
            path.model_copy(update={"name": self._members.name(path.peer)}) for path in event.ways if path.peer in ranks
        )
        return event.model_copy(update={"ways": tuple(named)})

    def _of_member(self, rank: int, event: Event) -> Event:
        state = self._sources.setdefault(rank, _SourceState())
        changes: dict[str, object] = {"member": rank, "seq": None}
        match event:
            case RunEvent():
                usual = event.status == "running" or (event.status == "paused" and self.may_pause)
                _check(usual, f"'{event.status}' may not come from a member")
                changes["time"] = time.time()  # the time of a run is counted by one clock
            case ElectionEvent():
                carrier = carrier_of(event.term)
                _check(carrier < len(self._members.plan.processes), "an unknown member")
                changes["name"] = self._members.name(rank)
                changes["carrier"] = "" if carrier == rank else self._members.name(carrier)
            case MemberEvent():
                _check(event.member in (None, rank), "it names another member")
                simulated = event.status == "lost" and self._members.plan.engine == "simulated"
                _check(simulated or event.status in _OF_ITSELF, f"'{event.status}' may not come from a member")
                changes["name"] = self._members.name(rank)
                state.joined |= event.status == "joined"
            case StepEvent():
                self._check_step(state, event.step)
            case SyncEvent() | EvaluationEvent() | SnapshotEvent():
                reached = self._newest() + _AHEAD if state.step is None else state.step + self._segment_steps
                if isinstance(event, EvaluationEvent):
                    reached += 1  # own weights are evaluated within a step, before they are averaged
                _check(event.step <= reached, f"step {event.step} has not been taken yet")
            case AnswerEvent():
                reached = (self._newest() if state.step is None else state.step) + self._segment_steps
                _check(event.step <= reached + 1, f"step {event.step} is not the next")
            case RequestEvent():
                _check((event.action, event.outcome) == ("expect", "done"), "an answer that may not come from a member")
            case UnknownEvent() | WaysEvent():
                raise ValueError(f"'{event.kind}' may not come from a member")
            case _:
                pass
        names = state.names.union(_names(event))
        _check(len(names) <= _MOST_NAMES, f"more than {_MOST_NAMES} different names")
        state.names = names
        return event.model_copy(update=changes)

    def _check_step(self, state: _SourceState, step: int) -> None:
        """Check that steps follow one another; the first step after joining may be anywhere near the others'. Members
        with their own pace may make the same step of the run twice, or leave some out."""
        if self._segment_steps and state.step is not None and not state.joined:
            limit = self._newest() + 2 * self._segment_steps
            _check(state.step <= step <= limit, f"step {step} after step {state.step}")
        elif state.step is None or (state.joined and step > state.step):
            _check(step <= self._newest() + _AHEAD + self._segment_steps, f"step {step} is far beyond the others'")
        else:
            _check(step == state.step + 1, f"step {step} after step {state.step}")
        state.joined = False
        limit = self._members.plan.profile.training.max_steps
        _check(not limit or step <= limit, f"step {step} of {limit}")
        state.step = step

    def _newest(self) -> int:
        sources = tuple(self._sources.values())  # another thread may let a newcomer in
        return max(self._step, *(state.step or 0 for state in sources))

    # ------------------------------------------------------------------------------------------------------- blame

    def _record_strike(self, source: int, line: bytes, reason: str) -> None:
        state, now = self._sources[source], time.monotonic()
        state.strikes.append(now)
        name = "the coordinator" if source == COORDINATOR else self._members.name(source)
        if now - state.warned >= _QUIET:
            state.warned = now
            message = harmless(f"{name} has written an invalid event ({reason}): {line[:200]!r}", 500)
            self._tell(WarningEvent(member=None if source == COORDINATOR else source, message=message))
        if source != COORDINATOR and len(state.strikes) == STRIKES and now - state.strikes[0] < MEMORY:
            state.strikes.clear()
            self._give_up(source, harmless(f"it has written {STRIKES} lines that are not events: {reason}", 300))

    # ------------------------------------------------------------------------------------------------------ budget

    def should_log(self, source: int, event: Event, size: int) -> bool:
        """Whether an event of ``size`` bytes belongs into the run's log.

        Beyond the budget only decisive events do, and one other line a second.
        """
        state, now = self._sources[source], time.monotonic()
        within = state.kept_bytes + size <= BUDGET or source == COORDINATOR
        if within or isinstance(event, _DECISIVE):
            state.kept_bytes += size
            if state.kept_bytes > 2 * BUDGET and source != COORDINATOR:
                self._give_up(source, f"it has written {bytes_text(state.kept_bytes)} of events")
            return True
        if state.last_kept is None:
            message = f"{self._members.name(source)} has written {bytes_text(BUDGET)} of events"
            self._tell(WarningEvent(member=source, message=f"{message}; one a second is kept from now on"))
        elif now - state.last_kept < 1.0:
            return False
        state.last_kept = now
        return True


def _names(event: Event) -> Iterator[str]:
    """Yield the names in an event under which a reader stores values."""
    if isinstance(event, EvaluationEvent):
        yield from (f"{event.split}/{metric}" for metric in ("", *event.metrics))
    elif isinstance(event, TimingEvent):
        yield event.part


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
