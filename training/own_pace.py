"""A member of a run whose members train at their own pace, between two points where all meet."""

from __future__ import annotations

from training.batches import StepBatches
from training.data import SampleSchedule
from training.events import SyncEvent
from training.plan import RunPlan
from training.strategies.registry import stretch_of
from training.trainer import Trainer


def trainer_class(plan: RunPlan) -> type[Trainer]:
    """Return the trainer of a run's members."""
    return OwnPaceTrainer if stretch_of(plan.profile.strategy) else Trainer


class OwnPaceTrainer(Trainer):
    """Its step is a whole stretch: what the strategy lets this member do of the steps up to the next meeting.

    In between it stands where the next piece of its work is: the learning rate follows the samples of all.
    """

    _meets = True
    """Whether it stands where all meet: only there its state is that after a step."""

    def _step(self) -> SyncEvent | None:
        position, begin = self.position, self.position.step
        self._meets = False
        self._begin = self._stands = begin, position.cursor
        self._end = self._next_meeting()
        self.strategy.begin_stretch(begin, self._end, sorted(position.batch_sizes), self._asked, self._ends)
        report: SyncEvent | None = None
        while self.strategy.places:
            if report is not None:
                self.emit(report.model_copy(update={"step": position.step}))
            newest = position.step - (position.step > begin)
            self._stand_at(self.strategy.places[0].step)
            position.step = max(position.step, newest)  # what a lost member left counts as a step of now
            report = super()._step()
        self._stand_at(self._end)
        self._meets = True
        self.control.arrive(self._end)
        return report

    def keep_last_step(self) -> bool:
        return self._meets and super().keep_last_step()

    def _asked(self, step: int) -> bool:
        """Whether this member is to meet the others after so many steps: for an order, or for one to be let in."""
        return self.control.asks(step) or (not self.exchange.shares_process and self.exchange.state_wanted)

    def _ends(self, step: int) -> None:
        self._end = step

    def _next_meeting(self) -> int:
        """Return after which step all meet next."""
        step, snapshots = self.position.step, self.profile.snapshot.snapshot_interval
        ends = [self.total_steps, step + stretch_of(self.profile.strategy)]
        if snapshots:
            ends.append((step // snapshots + 1) * snapshots)
        if self.profile.evaluation.eval_interval and self.position.next_evaluation > step:
            ends.append(self.position.next_evaluation)
        return min(ends)

    def _stand_at(self, step: int) -> None:
        """Go to the begin of a step."""
        at, cursor = self._stands if step >= self._stands[0] else self._begin
        sizes, schedule = self.position.batch_sizes, self.schedule
        assert isinstance(schedule, SampleSchedule), "a plan has made sure of it"
        while at < step:  # batches are made beside this, so it draws no order
            at, cursor = at + 1, schedule.after(schedule.start(cursor, sizes), sizes)
        self._stands = at, cursor
        self.position.step, self.position.cursor = at, cursor

    def _batches(self, most: int) -> StepBatches:
        """Return the batches of the next place, in micro-batches that this member has room for."""
        own, sizes, (place, *more) = self.member.batch_size, self.position.batch_sizes, self.strategy.places
        room = min(most or own, own)
        batches = self.source.take(self.position.cursor, sizes, False, room, place.rank)
        if more:
            cursor = self.position.cursor if more[0].step == place.step else batches.cursor
            if more[0].step <= place.step + 1:
                self.source.begin(cursor, sizes, room, more[0].rank)
        for message in self.samples.news():
            self._warn(message)
        return batches
