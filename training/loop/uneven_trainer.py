"""Members of unequal speed: those that train at their own pace between two meeting points, and those that train in step
on shares of the batch that follow their speed."""

from __future__ import annotations

from pathlib import Path

from training.data.balance import ShareBalance
from training.data.batches import StepBatches
from training.data.sample_order import SampleSchedule
from training.exchange.base import Exchange, Traffic
from training.layouts.base import Layout
from training.loop.trainer import Trainer
from training.loop.update import StepFigures
from training.records.events import Emit, SyncEvent
from training.records.plan import RunPlan
from training.run.local_plan import balances
from training.run.orders import Control
from training.strategies.registry import segment_steps_of, strategy_class
from training.tasks.base import Task


def trainer_class(plan: RunPlan) -> type[Trainer]:
    """Return the trainer class of a run's members."""
    if segment_steps_of(plan.profile.strategy):
        return UnevenTrainer
    return BalancedTrainer if balances(plan) else Trainer


class BalancedTrainer(Trainer):
    """Its share of every step follows its speed; see :mod:`training.data.balance`.

    Its micro-batches are never larger than planned, which is what fits into its memory: a larger share is computed in
    more of them.
    """

    def __init__(
        self, plan: RunPlan, rank: int, task: Task, exchange: Exchange, emit: Emit, control: Control, run_dir: Path,
        layout: Layout | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, rank, task, exchange, emit, control, run_dir, layout)
        sets_aside = strategy_class(self.profile.strategy.strategy).merges == "gradients"
        self._balance = self.position.balance = ShareBalance(self.settings.gradient_accumulation, sets_aside)

    def _batches(self, max_micro_batch: int) -> StepBatches:
        planned = self.member.batch_size
        if self.position.batch_sizes.get(self.rank, planned) != planned:
            max_micro_batch = min(max_micro_batch or planned, planned)
        return super()._batches(max_micro_batch)

    def _emit_step(
        self, batches: StepBatches, figures: StepFigures, rate: float, seconds: float, traffic: Traffic
    ) -> None:
        super()._emit_step(batches, figures, rate, seconds, traffic)
        self._balance.note_step(max(0.0, seconds - traffic.wait_seconds), seconds, batches.samples)

    def _at_synchronisation_point(self) -> None:
        step, sizes = self.position.step, self.position.batch_sizes
        if self._balance.is_due(step) and step < self.total_steps and len(sizes) > 1:
            decision = self._balance.meet(step, sizes, self.exchange, self._name_of)
            if decision is not None and decision.rank == self.rank:
                self._warn(decision.reason)
        super()._at_synchronisation_point()


class UnevenTrainer(Trainer):
    """Its step is a segment: the steps up to the next meeting point that the strategy assigns to this member.

    In between its position is that of its next piece of work: the learning rate follows the samples of all members.
    """

    def __init__(
        self, plan: RunPlan, rank: int, task: Task, exchange: Exchange, emit: Emit, control: Control, run_dir: Path,
        layout: Layout | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, rank, task, exchange, emit, control, run_dir, layout)
        self.pace.looks_at_every_meeting = True

    _is_at_meeting = True
    """Whether it is at a meeting point: only there is its state that after a step."""

    def _step(self) -> SyncEvent | None:
        position, begin = self.position, self.position.step
        self._is_at_meeting = False
        self._begin = self._reached = begin, position.cursor
        self._end = self._next_meeting()
        self.strategy.begin_segment(begin, self._end, sorted(position.batch_sizes), self._must_meet, self._set_end)
        report: SyncEvent | None = None
        while self.strategy.work_units:
            if report is not None:
                self.emit(report.model_copy(update={"step": position.step}))
            newest = position.step - (position.step > begin)
            self._move_to(self.strategy.work_units[0].step)
            position.step = max(position.step, newest)  # a step left by a lost member counts as a present one
            report = super()._step()
        self._move_to(self._end)
        self._is_at_meeting = True
        self.control.arrive(self._end)
        return report

    def keep_last_step(self) -> bool:
        return self._is_at_meeting and super().keep_last_step()

    def _must_meet(self, step: int) -> bool:
        """Whether this member is to meet the others after ``step`` steps: for an order, a newcomer or a snapshot."""
        if self.control.has_work_by(step):
            return True
        # a simulation repeats itself, so its meetings do not follow the clock
        return not self.exchange.shares_process and (self.exchange.must_publish_state or self.pace.is_overdue(step))

    def _set_end(self, step: int) -> None:
        self._end = step

    def _next_meeting(self) -> int:
        """Return the step after which all members meet next."""
        step, snapshots = self.position.step, self.profile.snapshot.steps
        ends = [self.total_steps, step + segment_steps_of(self.profile.strategy)]
        if snapshots:
            ends.append((step // snapshots + 1) * snapshots)
        if self.profile.evaluation.eval_interval and self.position.next_evaluation > step:
            ends.append(self.position.next_evaluation)
        return min(ends)

    def _move_to(self, step: int) -> None:
        """Move to the beginning of a step."""
        at, cursor = self._reached if step >= self._reached[0] else self._begin
        sizes, schedule = self.position.batch_sizes, self.schedule
        assert isinstance(schedule, SampleSchedule), "a plan has made sure of it"
        while at < step:  # batches are made beside this, so it draws no order
            at, cursor = at + 1, schedule.after(schedule.start(cursor, sizes), sizes)
        self._reached = at, cursor
        self.position.step, self.position.cursor = at, cursor

    def _batches(self, max_micro_batch: int) -> StepBatches:
        """Return the batches of the next assigned step, in micro-batches that fit into this member's memory."""
        own_size, sizes, (current, *following) = (
            self.member.batch_size,
            self.position.batch_sizes,
            self.strategy.work_units,
        )
        limit = min(max_micro_batch or own_size, own_size)
        batches = self.source.take(self.position.cursor, sizes, False, limit, current.rank)
        if following:
            cursor = self.position.cursor if following[0].step == current.step else batches.cursor
            if following[0].step <= current.step + 1:
                self.source.begin(cursor, sizes, limit, following[0].rank)
        for message in self.samples.take_warnings():
            self._warn(message)
        return batches
