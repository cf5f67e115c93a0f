"""Simulated time of a run on machines that are described in a file, and their failures.

The cost of a step comes from a :class:`Clock`, which the plan names (:class:`training.records.plan.ClockPlan`), since
the cost model is in a package above this one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from training.exchange.base import ExchangeDropped
from training.records.events import Event, RunEvent, StepEvent, SyncEvent
from training.records.plan import RunPlan
from training.run.orders import Command, Control


@dataclass(frozen=True)
class Cost:
    """Costs of a step of a group, in seconds."""

    seconds: float
    """From the begin of the step to that of the next one."""
    busy: Mapping[int, float]
    """Compute time of each member in the step, by rank."""
    exchange: float = 0.0
    """Duration of one exchange, hidden or not."""
    interval: int = 1
    """Steps between two exchanges; the wait of the last step is spread over all."""

    def wait(self, rank: int) -> float:
        """Return the seconds that a member is idle."""
        return max(0.0, self.seconds - self.busy[rank])


@dataclass(frozen=True)
class Absence:
    """Failure rate of a member, and how long it is away."""

    per_second: float = 0.0
    seconds: float = 0.0


class Clock(Protocol):
    """Knows the machines of a plan."""

    absences: Mapping[int, Absence]
    """By rank; members that are not listed never fail."""

    def cost(self, members: tuple[int, ...], trainable: int, steps: int) -> Cost:
        """Return the cost of a step of these members.

        Args:
            members: ranks, ascending.
            trainable: parameters.
            steps: of the whole run.

        Raises:
            BadInput: they cannot run it, for example since the model does not fit into a machine.
        """
        ...


def clock_of(plan: RunPlan) -> Clock | None:
    """Return the clock that a plan names; ``None``: it names none.

    Raises:
        BadInput: it cannot be used.
    """
    if plan.clock is None:
        return None
    module, _, factory = plan.clock.made_by.partition(":")
    clock: Clock = getattr(import_module(module), factory)(plan)
    return clock


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step of the group."""

    end: float
    """Simulated seconds since the run began."""
    cost: Cost
    lost: frozenset[int]
    """Ranks of members that fail before its end."""


class Timeline:
    """Simulated time by step, and the absent members.

    Depends on clock, seed and the steps at which members meet, but not on which member asks first. Times between
    failures are exponentially distributed. The last member never fails.

    Args:
        clock: knows the cost of a step.
        ranks: all members; all are present when the run begins or is resumed.
        seed: of the failures.
        step, seconds: where the run begins or is resumed.
    """

    def __init__(
        self,
        clock: Clock,
        ranks: Collection[int],
        trainable: int,
        steps: int,
        seed: int = 0,
        step: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self._clock, self._trainable, self.steps = clock, trainable, steps
        self._generators = {rank: random.Random(f"{seed}/{step}/{rank}") for rank in clock.absences}
        self._first_step = step
        self._simulated_steps = [SimulatedStep(seconds, Cost(0.0, {}), frozenset())]
        self.live = set(ranks)
        """Ranks that train after the newest step."""
        self._return_times: dict[int, float] = {}
        """Time at which absent members return, by rank."""
        self._returns: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._failure_times = {rank: seconds + self._time_to_failure(rank) for rank in ranks}
        self._guard = threading.Lock()

    def at(self, step: int) -> SimulatedStep:
        """Return a step; the first call for it simulates it."""
        with self._guard:
            while len(self._simulated_steps) <= step - self._first_step:
                self._simulated_steps.append(self._next())
            return self._simulated_steps[step - self._first_step]

    def _next(self) -> SimulatedStep:
        cost = self._clock.cost(tuple(sorted(self.live)), self._trainable, self.steps)
        end = self._simulated_steps[-1].end + cost.seconds
        failing = sorted((self._failure_times[rank], rank) for rank in self.live if self._failure_times[rank] <= end)
        if len(failing) == len(self.live):
            _, survivor = failing.pop()
            self._failure_times[survivor] = end + self._time_to_failure(survivor)
        for lost_at, rank in failing:
            self._return_times[rank] = lost_at + self._clock.absences[rank].seconds
            self.live.discard(rank)
        return SimulatedStep(end, cost, frozenset(rank for _, rank in failing))

    def return_at(self, step: int) -> tuple[int, tuple[int, ...]]:
        """Let members that returned train again after a step, if more steps follow.

        The step is the newest one when the first member calls it.

        Returns:
            The lowest rank that is training, and the returning ranks.
        """
        with self._guard:
            if step not in self._returns:
                now = self._simulated_steps[step - self._first_step].end
                returning = tuple(
                    sorted(
                        rank
                        for rank, returns_at in self._return_times.items()
                        if returns_at <= now and step < self.steps
                    )
                )
                self._returns[step] = min(self.live), returning
                for rank in returning:
                    del self._return_times[rank]
                    self.live.add(rank)
                    self._failure_times[rank] = now + self._time_to_failure(rank)
            return self._returns[step]

    def _time_to_failure(self, rank: int) -> float:
        """Return the seconds until a member's next failure."""
        absence = self._clock.absences.get(rank)
        return (
            self._generators[rank].expovariate(absence.per_second) if absence and absence.per_second else float("inf")
        )


class RunClock:
    """Simulated time of one run: puts it into the members' events, and makes failing members leave.

    Args:
        clock: of the plan.
        plan: of the run.
        earlier: returns the simulated seconds after a step of an earlier attempt.
        lose: called with the rank of a member that fails.
    """

    def __init__(
        self,
        clock: Clock,
        plan: RunPlan,
        earlier: Callable[[int], float],
        lose: Callable[[int], None],
    ) -> None:
        self._clock, self._plan, self._earlier, self._lose = clock, plan, earlier, lose
        self._steps = dict.fromkeys(range(plan.world_size), 0)
        self._guard = threading.Lock()
        self._timeline: Timeline | None = None

    def in_simulated_time(self, rank: int, event: Event) -> Event:
        """Return a member's event with simulated times."""
        if isinstance(event, RunEvent) and event.status == "running" and "trainable" in event.details:
            self._begin(event)
        elif isinstance(event, StepEvent):
            self._steps[rank] = event.step
            simulated_step = self.timeline.at(event.step)
            cost, wait = simulated_step.cost, simulated_step.cost.wait(rank)
            times = {"compute": cost.busy[rank], "wait": wait, "transfer": cost.exchange / cost.interval}
            return event.model_copy(update={**times, "clock": simulated_step.end})
        elif isinstance(event, SyncEvent):
            cost = self.timeline.at(event.step).cost
            wait = cost.interval * cost.wait(rank)
            return event.model_copy(update={"seconds": max(cost.exchange, wait), "wait": wait})
        return event

    def _begin(self, event: RunEvent) -> None:
        with self._guard:
            if self._timeline is None:
                step, steps = int(event.details.get("step", 0)), event.total_steps or 0
                self._timeline = Timeline(
                    self._clock,
                    self._steps,
                    int(event.details["trainable"]),
                    steps,
                    self._plan.profile.training.seed,
                    step,
                    self._earlier(step) if step else 0.0,
                )

    @property
    def timeline(self) -> Timeline:
        assert self._timeline is not None, "no member has begun"
        return self._timeline

    def begin(self, rank: int, step: int) -> None:
        """Called when a member begins a step.

        Raises:
            ExchangeDropped: the member fails in this step.
        """
        if step <= self.timeline.steps and rank in self.timeline.at(step).lost:
            self._lose(rank)
            raise ExchangeDropped(f"lost in step {step}, as the file of machines says")

    def meet(self, rank: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the step after which all meet, the lowest rank that is training, and the returning ranks."""
        step = self._steps[rank]
        return step, *self.timeline.return_at(step)


class ClockedControl(Control):
    """Commands of a member that may fail between two steps."""

    def __init__(self, clock: RunClock, rank: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._clock, self._rank = clock, rank

    def next(self, step: int, at_sync: bool = True) -> Command | None:
        command = super().next(step, at_sync)
        if command is None:
            self._clock.begin(self._rank, step + 1)
        return command
