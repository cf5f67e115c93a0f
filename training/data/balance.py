"""Shares of the batch that follow the members' measured speed while a run trains.

Every few steps, at a synchronisation point, members tell each other how long they computed for a sample, without
waiting. From the same figures and the same state all of them decide the same, so nobody has to be asked, whoever
carries the coordinator. A decision moves samples between members: the batch of the whole step stays as it is, and so
does the order of the samples, of which each member takes its slice
(:class:`training.data.sample_order.SampleSchedule`). So an epoch holds each sample once, whatever is decided.

One slow step, an evaluation or a snapshot moves nothing: the figure is a median over the window, and shares change only
if windows of :data:`LEAST_STEPS` steps and :data:`LEAST_SECONDS` seconds in a row promise a step that is shorter by
:data:`LEAST_GAIN`. Where they change again and again, this number of steps doubles each time.

A promise supposes that a sample takes as long in a larger share, unless the last change has shown otherwise: what a
further sample of a member takes is the difference of its two steps then. So shares settle where a host has a quota of
processor time, of which small shares need no more than it saves while it waits. Where passes have a cost of their own,
as on a GPU that small ones do not fill, a step may become longer instead: then the change is taken back, and not
repeated while members have the speeds at which it was in vain.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from training.data.even_split import longest, split_evenly
from training.data.set_aside import AsideMembers
from training.data.share_decisions import NOTED, Decision, aside_text, change_back, change_for_speed, trial_text
from training.exchange.base import Exchange
from training.exchange.payloads import figures_by_rank

WINDOW, WINDOW_SECONDS = 10, 0.5
"""Steps and seconds that members train at least between two reports of their speed."""
LEAST_STEPS, LEAST_SECONDS = 20, 2.0
"""Steps and seconds for which windows in a row must promise the gain."""
LEAST_GAIN, LEAST_SAVING = 0.1, 0.005
"""Least share of a step, and of its seconds, for which shares change."""
_RECENT, _MOST_DOUBLED = 400, 5
"""Steps after which a change counts no longer as one of many, and how often the steps before the next one double."""
_MOST_WINDOW, _FEWEST_MEASURED = 1000, 5
_LEAST_MOVED, _LEAST_SLOPE, _MOST_SLOPE = 0.2, 0.5, 10.0
"""Least part by which a share must have changed to show what a further sample takes, and bounds of that, as a multiple
of the seconds for a sample."""


class Speed(NamedTuple):
    """What a member reports of the steps since the last report."""

    seconds: float
    """Computing for a sample, median over the steps."""
    step: float
    """Of a step with its waiting, mean over the steps."""
    steps: float


class Measured(NamedTuple):
    """What a member took for a sample, when its share was first of this size at this speed."""

    size: int
    seconds: float


class Replaced(NamedTuple):
    """Shares that a change has replaced."""

    sizes: dict[int, int]
    """Micro-batch of every member then live, by rank."""
    seconds: dict[int, float]
    """What a sample took with them, by rank."""

    def most_seconds(self, rank: int, size: int) -> float:
        """Return the seconds that a micro-batch of ``size`` samples takes at most at this speed of the member: those of
        as many passes as begin with it, each as long as one before."""
        return math.ceil(size / self.sizes[rank]) * self.sizes[rank] * self.seconds[rank]


@dataclass
class ShareBalance:
    """The shares that changed, and what was measured since. All members hold the same, but for their own window."""

    accumulation: int = 1
    """Micro-batches in a step."""
    sets_aside: bool = False
    """Whether a member that costs more than it adds gets no samples for a while (:mod:`training.data.set_aside`)."""
    aside: AsideMembers = field(default_factory=AsideMembers)
    sizes: dict[int, int] = field(default_factory=dict)
    """Micro-batch by rank, of the members whose share was changed."""
    reports: int = 0
    """How often members have told each other their speed."""
    next_report: int = WINDOW
    """Steps of the run after which they do so next."""
    evidence: tuple[int, float] = (0, 0.0)
    """Steps and seconds of the windows in a row that promised a gain."""
    changes: list[int] = field(default_factory=list)
    """Steps after which shares changed, the newest ones."""
    reference: dict[int, float] = field(default_factory=dict)
    """Seconds for a sample by rank, at the first report or the last change."""
    replaced: Replaced | None = None
    """What the last change has replaced, until a report shows that steps are no longer than before."""
    vain: dict[int, float] = field(default_factory=dict)
    """Seconds for a sample by rank at which the last change was in vain."""
    measured: dict[int, Measured] = field(default_factory=dict)
    """By rank, with its present share."""
    before: dict[int, Measured] = field(default_factory=dict)
    """By rank, with another share; only while its speed is that of then."""
    _window: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_WINDOW))

    def sizes_of(self, planned: Mapping[int, int]) -> dict[int, int]:
        """Return the micro-batches of live members, together as many samples as planned for them: when the member with
        most of the samples is lost, the others' step does not shrink by more than its planned share.

        Args:
            planned: their micro-batches by rank as the plan has them.
        """
        aside = dict.fromkeys(self.aside.left.keys() & planned.keys(), 0)
        if len(aside) == len(planned):
            aside = {}
        sizes = {rank: max(1, self.sizes.get(rank, size)) for rank, size in planned.items() if rank not in aside}
        if sum(sizes.values()) != (total := sum(planned.values())):
            sizes = split_evenly(total, {rank: 1 / size for rank, size in sizes.items()})
        return sizes | aside

    def note_step(self, compute: float, seconds: float, samples: int) -> None:
        """Record a step of this member.

        Args:
            compute: seconds without waiting.
            seconds: of the whole step.
        """
        if samples:
            self._window.append((compute / samples, seconds))

    def is_due(self, step: int) -> bool:
        """Whether members report their speed at a synchronisation after ``step`` steps."""
        return step >= self.next_report

    def meet(
        self, step: int, sizes: Mapping[int, int], exchange: Exchange, name_of: Callable[[int], str]
    ) -> Decision | None:
        """Exchange the members' speeds; return what is decided. A collective call of all members.

        Args:
            step: after which they meet.
            sizes: micro-batch of each member in the steps before, by rank.
        """
        report = self._report()
        gathered = exchange.gather(f"balance/{step}", json.dumps(report._asdict() if report else {}).encode())
        speeds = {rank: _valid_speed(figures) for rank, figures in figures_by_rank(gathered).items()}
        valid = {rank: speed for rank in sizes if (speed := speeds.get(rank)) is not None}
        decision = self.decide(step, dict(sizes), valid, name_of)
        self.reports += 1
        return decision

    def decide(
        self, step: int, sizes: dict[int, int], speeds: Mapping[int, Speed], name_of: Callable[[int], str] = str
    ) -> Decision | None:
        """Return the change of shares after ``step`` steps, if there is one, and record it.

        Args:
            sizes: micro-batch of each live member, by rank.
            speeds: their valid reports; where one lacks of a member that trains, nothing changes.
        """
        self.next_report = step + WINDOW
        live, sizes = sizes, {rank: size for rank, size in sizes.items() if size}
        if len(live) < 2 or not speeds.keys() >= sizes.keys():
            self.evidence = (0, 0.0)
            return None
        speeds = {rank: speeds[rank] for rank in sizes}
        seconds = {rank: speed.seconds for rank, speed in speeds.items()}
        step_seconds = statistics.median(speed.step for speed in speeds.values())
        measured_steps = int(statistics.median(speed.steps for speed in speeds.values()))
        self.next_report = step + window_steps(step_seconds)
        if self.sets_aside and (
            decision := self._judge_costs(live, sizes, seconds, (step_seconds, measured_steps), name_of)
        ):
            self.sizes |= decision.sizes
            self.reference, self.replaced, self.vain, self.evidence = dict(seconds), None, {}, (0, 0.0)
            self.changes = [*self.changes[-_MOST_DOUBLED:], step]
            return decision
        if len(sizes) < 2:
            return None
        for rank, value in seconds.items():
            self.reference.setdefault(rank, value)
        self._note_measured(sizes, seconds)
        now = self.accumulation * longest(sizes, seconds)
        least_gain = max(LEAST_SAVING, LEAST_GAIN * max(now, step_seconds))
        replaced = self._better_before(sizes, seconds, now - least_gain)
        if replaced:
            best, then = replaced.sizes, self.accumulation * longest(*replaced)
        else:
            costs = self._costs(sizes, seconds)
            best = split_evenly(sum(sizes.values()), *costs)
            then = self.accumulation * longest(best, *costs)
        if now - then < least_gain or (not replaced and self._is_in_vain(seconds)):
            self.evidence = (0, 0.0)
            return None
        steps, duration = self.evidence
        self.evidence = steps + measured_steps, duration + measured_steps * step_seconds
        patience = LEAST_STEPS if replaced else self.patience(step)
        if self.evidence[0] < patience or self.evidence[1] < LEAST_SECONDS:
            return None
        if replaced:
            decision = change_back(self.accumulation, sizes, best, (then, now), self.changes[-1], name_of)
            self.reference, self.replaced, self.vain = replaced.seconds, None, replaced.seconds
        else:
            decision = change_for_speed(
                self.accumulation, sizes, best, (seconds, self.reference), self.changes, name_of
            )
            self.reference, self.replaced, self.vain = seconds, Replaced(dict(sizes), seconds), {}
        self.sizes |= best
        self.evidence, self.changes = (0, 0.0), [*self.changes[-_MOST_DOUBLED:], step]
        return decision

    def _judge_costs(
        self,
        live: Mapping[int, int],
        sizes: Mapping[int, int],
        seconds: Mapping[int, float],
        measured: tuple[float, int],
        name_of: Callable[[int], str],
    ) -> Decision | None:
        """Return the decision that sets a member aside, or tries one again; ``sizes``: of those that train."""
        (step_seconds, steps), total = measured, sum(sizes.values())
        self.aside.keep(live)
        if (back := self.aside.pass_time(step_seconds * steps)) is not None and total > len(sizes):
            return Decision(split_evenly(total - 1, seconds) | {back: 1}, back, trial_text(back, name_of))
        if (judged := self.aside.judge(sizes, seconds, step_seconds / self.accumulation, steps)) is None:
            return None
        rank, *times = judged[0], self.accumulation * seconds[judged[0]], self.accumulation * judged[1]
        others = split_evenly(total, {other: seconds[other] for other in sizes if other != rank})
        return Decision(others | {rank: 0}, rank, aside_text(rank, times, self.aside.left[rank], name_of))

    def _better_before(self, sizes: Mapping[int, int], seconds: Mapping[int, float], least: float) -> Replaced | None:
        """Return what the last change replaced if a step took at most ``least`` seconds with it; else forget it, as
        where a member has become slower meanwhile by more than its new share explains."""
        before = self.replaced
        if before is None:
            return None
        if (
            before.sizes.keys() == sizes.keys()
            and self.accumulation * longest(*before) <= least
            and all(sizes[rank] * seconds[rank] <= NOTED * before.most_seconds(rank, sizes[rank]) for rank in sizes)
        ):
            return before
        self.replaced, self.evidence = None, (0, 0.0)
        return None

    def _note_measured(self, sizes: Mapping[int, int], seconds: Mapping[int, float]) -> None:
        """Record what a sample takes in the shares of now; forget what it took before where a speed has changed."""
        for rank, size in sizes.items():
            newest, last = Measured(size, seconds[rank]), self.measured.setdefault(rank, Measured(size, seconds[rank]))
            if abs(size - last.size) > _LEAST_MOVED * max(size, last.size):
                self.before[rank], self.measured[rank] = last, newest
            elif size == last.size and not 1 / NOTED < newest.seconds / last.seconds < NOTED:
                self.before.pop(rank, None)
                self.measured[rank] = newest

    def _costs(
        self, sizes: Mapping[int, int], seconds: Mapping[int, float]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the seconds that a further sample takes, and those that a micro-batch takes beside its samples, which
        may be negative; by rank."""
        costs = dict(seconds)
        for rank in sizes.keys() & self.before.keys():
            size, value = self.before[rank]
            if size != sizes[rank]:
                slope = (sizes[rank] * seconds[rank] - size * value) / (sizes[rank] - size)
                costs[rank] *= min(_MOST_SLOPE, max(_LEAST_SLOPE, slope / seconds[rank]))
        return costs, {rank: size * (seconds[rank] - costs[rank]) for rank, size in sizes.items()}

    def _is_in_vain(self, seconds: Mapping[int, float]) -> bool:
        """Whether members have the speeds at which a change was taken back."""
        if self.vain.keys() != seconds.keys():
            return False
        return all(1 / NOTED < value / self.vain[rank] < NOTED for rank, value in seconds.items())

    def patience(self, step: int) -> int:
        """Return the steps for which windows in a row must promise a gain before shares change after ``step`` steps."""
        recent = sum(step - change < _RECENT for change in self.changes)
        return int(LEAST_STEPS * 2 ** min(_MOST_DOUBLED, max(0, recent - 1)))

    def _report(self) -> Speed | None:
        window = list(self._window)
        self._window.clear()
        if len(window) < _FEWEST_MEASURED:
            return None
        seconds, steps = zip(*window, strict=True)
        return Speed(statistics.median(seconds), statistics.fmean(steps), len(window))

    def state(self) -> dict[str, Any]:
        """JSON-able part for snapshots and newcomers."""
        return {
            "sizes": [*self.sizes.items()],
            "reports": self.reports,
            "next_report": self.next_report,
            "evidence": self.evidence,
            "changes": self.changes,
            "reference": [*self.reference.items()],
            "replaced": [[*part.items()] for part in self.replaced or ()],
            "vain": [*self.vain.items()],
            "measured": [[*part.items()] for part in (self.measured, self.before)],
            "aside": self.aside.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state`; an empty one has nothing to restore."""
        if not state:
            return
        self.sizes = {int(rank): max(0, int(size)) for rank, size in state["sizes"]}
        self.aside = AsideMembers.load(state.get("aside"))
        self.reports, self.next_report = int(state["reports"]), int(state["next_report"])
        steps, seconds = state["evidence"]
        self.evidence, self.changes = (int(steps), float(seconds)), [int(step) for step in state["changes"]]
        self.reference = {int(rank): float(value) for rank, value in state["reference"]}
        self.vain = {int(rank): float(value) for rank, value in state.get("vain", [])}
        self.measured, self.before = (
            {int(rank): Measured(int(size), float(value)) for rank, (size, value) in part}
            for part in state.get("measured", ([], []))
        )
        self.replaced = None
        if before := state.get("replaced"):
            replaced_sizes, replaced_seconds = before
            self.replaced = Replaced(
                {int(rank): max(1, int(size)) for rank, size in replaced_sizes},
                {int(rank): float(value) for rank, value in replaced_seconds},
            )
        self._window.clear()


def window_steps(step_seconds: float) -> int:
    """Return the steps between two reports where a step takes so long."""
    return min(_MOST_WINDOW, max(WINDOW, math.ceil(WINDOW_SECONDS / max(step_seconds, 1e-6))))


def reports_held(state: Mapping[str, Any]) -> int:
    """Return how many reports of speeds the state of a snapshot holds: members that lost one another in one differ."""
    balance = state.get("balance") or {}
    return int(balance.get("reports", 0))


def _valid_speed(figures: Mapping[str, float]) -> Speed | None:
    """Return a member's report with its figures in bounds; ``None``: it has none, or an impossible one."""
    values = [figures.get(name, math.nan) for name in Speed._fields]
    if not all(1e-9 < value < 1e6 for value in values):
        return None
    return Speed(*values)
