"""The time that a simulated run would take on machines that nobody here owns, and which of them are away.

What a step costs comes from outside (:class:`Clock`): the plan names what makes it (:class:`training.plan.ClockPlan`),
as the cost model stands above this package.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from training.events import Event, RunEvent, StepEvent, SyncEvent
from training.exchange.base import ExchangeDropped
from training.orders import Command, Control
from training.plan import RunPlan


@dataclass(frozen=True)
class Cost:
    """What a step of a group costs; in seconds."""

    seconds: float
    """From its begin to that of the next one."""
    busy: Mapping[int, float]
    """Of them, those in which each member computes, by rank."""
    exchange: float = 0.0
    """Of one exchange, hidden or not."""
    interval: int = 1
    """Steps between two exchanges; what the last one of them waits is spread over all."""

    def wait(self, rank: int) -> float:
        """Return the seconds that a member stands still."""
        return max(0.0, self.seconds - self.busy[rank])


@dataclass(frozen=True)
class Absence:
    """How often a member is lost, and for how long it is away."""

    per_second: float = 0.0
    seconds: float = 0.0


class Clock(Protocol):
    """What is known of the machines of a plan."""

    absences: Mapping[int, Absence]
    """By rank; who is not named is never lost."""

    def cost(self, members: tuple[int, ...], trainable: int, steps: int) -> Cost:
        """Return what a step of these members costs.

        Args:
            members: ranks, ascending.
            trainable: parameters.
            steps: of the whole run.

        Raises:
            BadInput: it cannot be: the model does not fit into a machine, ...
        """
        ...


def clock_of(plan: RunPlan) -> Clock | None:
    """Return the clock that a plan names.

    Raises:
        BadInput: it cannot be used.
    """
    if plan.clock is None:
        return None
    module, _, factory = plan.clock.made_by.partition(":")
    clock: Clock = getattr(import_module(module), factory)(plan)
    return clock


@dataclass(frozen=True)
class Moment:
    """A step of the group."""

    end: float
    """Simulated seconds since the run began."""
    cost: Cost
    lost: frozenset[int]
    """Ranks of those who are lost before its end, so that the others do without them."""


class Timeline:
    """Simulated time by step, and who is away. It follows from clock, seed and the steps at which members meet, and not
    from which member asks first.

    A loss comes after a time that is exponentially distributed, whatever was before it. The last member is never lost.

    Args:
        clock: says what a step costs.
        ranks: all members; they are there when the run begins, or goes on.
        seed: of the losses.
        step, seconds: where it goes on.
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
        self._chance = {rank: random.Random(f"{seed}/{step}/{rank}") for rank in clock.absences}
        self._first_step = step
        self._moments = [Moment(seconds, Cost(0.0, {}), frozenset())]
        self.live = set(ranks)
        """Who trains after the newest step."""
        self._back: dict[int, float] = {}
        """When those who are away are back."""
        self._returns: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._fails = {rank: seconds + self._spared(rank) for rank in ranks}
        self._guard = threading.Lock()

    def at(self, step: int) -> Moment:
        """Return a step; whoever comes to it first begins it."""
        with self._guard:
            while len(self._moments) <= step - self._first_step:
                self._moments.append(self._next())
            return self._moments[step - self._first_step]

    def _next(self) -> Moment:
        cost = self._clock.cost(tuple(sorted(self.live)), self._trainable, self.steps)
        end = self._moments[-1].end + cost.seconds
        failing = sorted((self._fails[rank], rank) for rank in self.live if self._fails[rank] <= end)
        if len(failing) == len(self.live):
            _, survivor = failing.pop()
            self._fails[survivor] = end + self._spared(survivor)
        for lost_at, rank in failing:
            self._back[rank] = lost_at + self._clock.absences[rank].seconds
            self.live.discard(rank)
        return Moment(end, cost, frozenset(rank for _, rank in failing))

    def return_at(self, step: int) -> tuple[int, tuple[int, ...]]:
        """Members meet after a step, the newest when the first of them says so: who is back trains from then on, if
        there are more.

        Returns:
            The lowest rank of those who have trained, and who is back.
        """
        with self._guard:
            if step not in self._returns:
                now = self._moments[step - self._first_step].end
                returning = tuple(
                    sorted(rank for rank, returns_at in self._back.items() if returns_at <= now and step < self.steps)
                )
                self._returns[step] = min(self.live), returning
                for rank in returning:
                    del self._back[rank]
                    self.live.add(rank)
                    self._fails[rank] = now + self._spared(rank)
            return self._returns[step]

    def _spared(self, rank: int) -> float:
        """Return after how many seconds a member is lost next."""
        absence = self._clock.absences.get(rank)
        return self._chance[rank].expovariate(absence.per_second) if absence and absence.per_second else float("inf")


class RunClock:
    """The simulated time of one run: its members' events tell it, and who is lost leaves.

    Args:
        clock: of the plan.
        plan: of the run.
        earlier: gives the simulated seconds after a step of an earlier attempt.
        lose: called with the rank of who is lost.
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
        """Return what a member tells, in simulated time."""
        if isinstance(event, RunEvent) and event.status == "running" and "trainable" in event.details:
            self._begin(event)
        elif isinstance(event, StepEvent):
            self._steps[rank] = event.step
            moment = self.timeline.at(event.step)
            cost, wait = moment.cost, moment.cost.wait(rank)
            times = {"compute": cost.busy[rank], "wait": wait, "transfer": cost.exchange / cost.interval}
            return event.model_copy(update={**times, "clock": moment.end})
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
        """A member comes to a step.

        Raises:
            ExchangeDropped: it is lost in it.
        """
        if step <= self.timeline.steps and rank in self.timeline.at(step).lost:
            self._lose(rank)
            raise ExchangeDropped(f"lost in step {step}, as the file of machines says")

    def meet(self, rank: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the step after which all meet, the lowest rank of those who are there, and who comes back."""
        step = self._steps[rank]
        return step, *self.timeline.return_at(step)


class ClockedControl(Control):
    """Commands of a member that may be lost between two steps."""

    def __init__(self, clock: RunClock, rank: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._clock, self._rank = clock, rank

    def next(self, step: int, at_sync: bool = True) -> Command | None:
        command = super().next(step, at_sync)
        if command is None:
            self._clock.begin(self._rank, step + 1)
        return command
