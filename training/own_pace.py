"""A member of a run whose members train at their own pace, between two points where all meet."""

from __future__ import annotations

from profiles.errors import BadInput
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

    def _set_up(self) -> None:
        super()._set_up()
        name, more = self.strategy.name, self.profile
        if not isinstance(self.schedule, SampleSchedule):
            hint = "leave out split and local_data, or take another strategy"
            raise BadInput(f"with {name} no part of the data belongs to one machine: it takes what is next", hint)
        if more.evaluation.eval_local:
            hint = "set eval_local = false"
            raise BadInput(f"with {name} weights are not averaged all at once, so eval_local means nothing", hint)

    def _step(self) -> SyncEvent | None:
        position, begin, end = self.position, self.position.step, self._next_meeting()
        self._stands = begin, position.cursor
        self.strategy.begin_stretch(begin, end, sorted(position.batch_sizes))
        self.control.arrive(end)
        report: SyncEvent | None = None
        while self.strategy.places:
            if report is not None:
                self.emit(report.model_copy(update={"step": position.step}))
            self._stand_at(self.strategy.places[0].step)
            report = super()._step()
        self._stand_at(end)
        return report

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
        """Go to the begin of a step, none before the one where this member stood last."""
        at, cursor = self._stands
        sizes = self.position.batch_sizes
        while at < step:
            at, cursor = at + 1, self.schedule.step(cursor, sizes, min(sizes))[1]
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
