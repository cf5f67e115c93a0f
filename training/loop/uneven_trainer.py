"""A member of a run whose members train at their own pace between two meeting points."""

from __future__ import annotations

from training.data.batches import StepBatches
from training.data.sample_order import SampleSchedule
from training.loop.trainer import Trainer
from training.records.events import SyncEvent
from training.records.plan import RunPlan
from training.strategies.registry import segment_steps_of


def trainer_class(plan: RunPlan) -> type[Trainer]:
    """Return the trainer class of a run's members."""
    return UnevenTrainer if segment_steps_of(plan.profile.strategy) else Trainer


class UnevenTrainer(Trainer):
    """Its step is a segment: the steps up to the next meeting point that the strategy assigns to this member.

    In between its position is that of its next piece of work: the learning rate follows the samples of all members.
    """

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
        """Whether this member is to meet the others after ``step`` steps: for an order, or for a newcomer."""
        return self.control.has_work_by(step) or (not self.exchange.shares_process and self.exchange.must_publish_state)

    def _set_end(self, step: int) -> None:
        self._end = step

    def _next_meeting(self) -> int:
        """Return the step after which all members meet next."""
        step, snapshots = self.position.step, self.profile.snapshot.snapshot_interval
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
