"""The loop: batch -> loss -> backward -> strategy -> optimizer -> events, evaluation, snapshots.

:class:`Trainer` is one member of a run. It reads from top to bottom: :meth:`Trainer.run` prepares, takes its starting
state (fresh, from a snapshot, or from the group as a newcomer), trains to the last step, and finishes.
"""

from __future__ import annotations

import time
from pathlib import Path

from profiles.errors import ExitCode
from training.data.batches import Samples, StepBatches
from training.data.reading import batch_source
from training.exchange.base import Exchange, JoiningState, Traffic
from training.hardware.device import Precision, select_device, select_precision
from training.hardware.giving_way import GivingWay
from training.layouts.base import Layout
from training.layouts.columns import strategy_of
from training.layouts.whole import WholeModel
from training.loop.data_fingerprint import change_warnings, check_devices, check_same, check_unchanged, describe
from training.loop.evaluation import Evaluator, evaluates_local_weights, progress_reports
from training.loop.last_step import LastStep
from training.loop.local_data import LocalSchedule, schedule_for, total_steps
from training.loop.position import MOST_CUT_SHORT, EarlyStopping, Position
from training.loop.resuming import agree_on_snapshot, hand_over, load_agreed, take_over
from training.loop.state import (
    TrainingState,
    check_finite,
    longest_vector,
    prefixed,
    synchronise_buffers,
    tensors_under,
)
from training.loop.update import LeftOutSteps, StepFigures, Update
from training.numerics.compression_ratio import CompressionRatio
from training.numerics.randomness import seed_everything
from training.numerics.schedule import peak_rate
from training.optimization.backward import loss_problem
from training.optimization.learning_rates import LearningRates
from training.optimization.optimizers import build_optimizer, set_learning_rate
from training.optimization.weight_average import WeightAverage
from training.records.events import SAVES_MODEL, Emit, MemberEvent, RunEvent, StepEvent, SyncEvent, WarningEvent
from training.records.plan import RunPlan
from training.run.orders import Control
from training.snapshots.member_snapshots import MemberSnapshots, Origin
from training.snapshots.snapshot_copies import copies_of
from training.snapshots.snapshot_pace import SnapshotPace
from training.snapshots.snapshot_store import Snapshot
from training.snapshots.snapshot_writer import SnapshotWriter
from training.strategies.base import Strategy, StrategyContext
from training.strategies.costs import start_of
from training.strategies.registry import strategy_class
from training.strategies.weights import sync_weights, trainable
from training.tasks.base import Task


class Trainer:
    """One member of a run.

    Args:
        run_dir: run folder on this machine; the model and the snapshots go there.
        layout: what this process holds of the member's model; default: all of it.
    """

    def __init__(
        self, plan: RunPlan, rank: int, task: Task, exchange: Exchange, emit: Emit, control: Control, run_dir: Path,
        layout: Layout | None = None,
    ) -> None:  # fmt: skip
        process = plan.process(rank)
        self.plan, self.task, self.run_dir, self.layout = plan, task, run_dir, layout or WholeModel()
        self.emit, self.control, self.exchange, self.name = emit, control, exchange, process.name
        self.profile, self.settings, self.member = plan.profile, plan.profile.training, process.member
        self.rank, self.device = self.member.rank, select_device(process.device.kind, process.device.index)
        precision = select_precision(self.settings.mixed_precision, self.device, task.bf16_is_faster)
        self.precision = Precision(precision, self.device)
        self.snapshots = MemberSnapshots(run_dir / "checkpoints", plan, rank)
        self.writer = SnapshotWriter(self.snapshots.own, self.device, self.name, emit, run_dir)
        self.writer.copies = copies_of(self.snapshots, self.layout.background, self.layout.gather, self._warn)
        self.stopping = EarlyStopping.of(plan.profile.evaluation)
        self.position = Position(self.stopping, batch_sizes={m.rank: m.batch_size for m in plan.members})
        self._may_leave, self.giving_way = not self.layout.is_part, GivingWay(self.name, emit)
        self.pace = self.position.pace = SnapshotPace(plan.profile.snapshot, self.writer, exchange, self.layout.largest)

    # ------------------------------------------------------------------------------------------------- life of a run

    def run(self) -> ExitCode:
        """Train to the end or to a stop.

        Raises:
            RunFailed: the loss is not finite, a snapshot cannot be written, ...
            ExchangeError: the group cannot go on.
            BadInput: the data or the model cannot be used.
        """
        self._set_up()
        try:
            self._take_starting_state()
            self.emit(MemberEvent(status="ready", name=self.member.name, device=str(self.device)))
            if self.position.step == 0 and self.profile.evaluation.eval_before:
                self._evaluate(self.evaluator.splits)
            ending = self._train()
            return self._finish() if ending is ExitCode.DONE else ending
        finally:
            self.source.close()
            self.writer.close()

    def _set_up(self) -> None:
        seed_everything(self.settings.seed)
        self.model = model = self.layout.build(self.task, self.profile, self.precision)
        self.parameters = trainable(self.model)
        self.compression = CompressionRatio(self.parameters, self.exchange)
        self.exchange.expect_model(self.layout.largest(longest_vector(self.model)))
        kind, strategy = strategy_of(self.plan, self.layout)
        settings, plain = self.settings, kind.name if kind.replaces_optimizer else ""  # it has one itself
        self.optimizer = build_optimizer(model, settings, self.layout.is_part, self.task.optimizer, plain)
        self.schedule = schedule_for(self.plan, self.task, self.rank, self.exchange)
        self.local = self.schedule if isinstance(self.schedule, LocalSchedule) else None
        self.position.set_data(self.task.train, self.local.partition_of(self.rank) if self.local else 0)
        self.position.schedule = None if kind.segment_steps(self.profile.strategy) else self.schedule
        self.total_steps = self.pace.total_steps = total_steps(self.plan, self.schedule)
        start, norm = start_of(self.profile), settings.max_grad_norm
        peak = peak_rate(settings, self.plan.global_batch, start in kind.scales_learning_rate)
        self._rates = LearningRates(settings, self.total_steps, peak, self.task.lr_scheduler)
        context = StrategyContext(strategy, self.total_steps, settings.seed, self._warn, start, norm)
        self.strategy: Strategy = kind(context)
        self.strategy.set_optimizer(self.optimizer)
        self.layout.optimizer = self.optimizer
        self.samples = Samples(self.task, settings.seed, self.device, self.profile.data.max_broken_share, self.name)
        reading = not self.exchange.shares_process, self._warn, kind.merges == "weights"
        self.source = batch_source(self.plan, self.task, self.schedule, self.rank, self.samples, *reading)
        self.backward = self.layout.backward(self.writer.release, self.total_steps)
        self.report = progress_reports(self.emit, self.position, self.total_steps)
        self.evaluator = Evaluator(
            self.samples, self.layout.module, self.precision, self.exchange, self.profile.evaluation,
            self.member.batch_size, lambda: self.layout.any(self.control.stop_is_near()), self._warn, self.run_dir,
            self._name_of, self.local, layout=self.layout, progress=self.report,
        )  # fmt: skip
        self.average, self.last_step = WeightAverage(model, settings.ema), LastStep(self.model, self.device, kind)
        self.state = TrainingState(self.model, self.optimizer, self.precision, self.average)
        self.update = Update(
            self.parameters, self.precision, self.optimizer, self.strategy, self.exchange, self.last_step, norm,
            self.layout.norm, LeftOutSteps(self._warn, self.writer.newest_in_words, not self.layout.is_part),
        )  # fmt: skip
        # Dropout must differ between members; weights were made before this line.
        seed_everything(self.settings.seed * 1000 + self.rank)

    def _take_starting_state(self) -> None:
        gather, of_run = self.layout.gather, (self._warn, self.precision.name, self.schedule.fingerprint)
        self.data = describe(self.task, self.layout.weights(False), self.samples, self.settings.seed, *of_run, gather)
        check_devices(self.data, gather, self.layout.names, self._warn)
        self.shared_data = self.data.without_samples() if self.local else self.data
        arrived = self.local.arrived if self.local else self.layout.fetch_state(self.exchange)
        if arrived is not None:
            return self._join(arrived)
        check_same(self.shared_data, self.exchange, self._name_of, self._warn)
        agreed = None
        if self.plan.resume:
            alike = strategy_class(self.profile.strategy.strategy).has_equal_snapshots(self.profile.strategy)
            more = self._name_of, alike, map(self._name_of, self.plan.absent), self.strategy.rounds_held, self.layout
            agreed = agree_on_snapshot(self.snapshots.to_check, self.exchange, self._warn, self.plan.hash(), *more)
        if agreed is None:  # a new run
            sync_weights(self.parameters, self.exchange, "weights/start")
            self.strategy.attach(self.model, self.exchange)
            self.position.next_evaluation = self.profile.evaluation.interval_in(self.total_steps)
            self.position.begin(self.plan.attempt)
        elif agreed.parts is not None:
            self.strategy.attach(self.model, self.exchange)
            self._restore(load_agreed(agreed, self.snapshots, self.layout, self.state.holds, self._warn))
            self.position.begin(self.plan.attempt)
            hand_over(agreed, self.exchange, self._joining)
        else:
            self._join(take_over(agreed, self.exchange))
        self.control.arrive(self.position.step)
        step, tables, weights = self.position.step, self.shared_data.tables, self.layout.trained_weights()
        details = {"step": step, "tables": tables, "trainable": weights}
        self.emit(RunEvent(status="running", total_steps=self.total_steps, details=details))
        if self.position.step and (self.strategy.synchronised or self.position.evaluation_is_pending):
            self._evaluate_if_due()  # a stop may have cut it short

    def _train(self) -> ExitCode:
        at_sync = True
        while True:
            done = self.position.step >= self.total_steps or self.stopping.should_stop
            # A member that is dropped after the last step stays to the end: the others may need it to save the model.
            if self._carry_out_orders(at_sync and not done) is ExitCode.STOPPED:
                return ExitCode.STOPPED
            if done:
                self.writer.wait()
                return ExitCode.DONE
            self.writer.check()
            if (report := self._step()) is not None:
                self.emit(self.compression.complete_report(report, self.position.step))
            is_due = self.pace.is_due(self.position.step, at_sync := self.strategy.meets(report))
            if at_sync:
                self._at_synchronisation_point()
            if is_due:
                self._snapshot()

    def _finish(self) -> ExitCode:
        if (report := self.strategy.finish()) is not None:
            self.emit(self.compression.complete_report(report, self.position.step))
        with self.strategy.consensus():
            synchronise_buffers(self.model, self.exchange, "finish")
            attempt = 0
            while not self._evaluate_and_save(attempt):
                if self._carry_out_orders(at_sync=False, finishing=True) is ExitCode.STOPPED:
                    return ExitCode.STOPPED
                attempt += 1  # another member stopped
        return ExitCode.DONE

    def _evaluate_and_save(self, attempt: int) -> bool:
        """Evaluate and save the result; return whether no member stopped meanwhile."""
        with self.average.in_use(self.strategy, self.exchange, f"ema/finish/{attempt}"):
            if self.stopping.should_stop:
                self.stopping.restore(self.model)
            self.layout.align_ties(self.strategy)
            if not self._evaluate(self.evaluator.splits, attempt):
                return False
            if self.rank == min(self.layout.members(self.strategy, self.exchange)):
                self.report(SAVES_MODEL, 0, None)
                self.layout.save(self.run_dir)
            elif self.plan.own_folders and (problem := self.layout.save_copy(self.run_dir)):
                self._warn(f"{self.member.name} {problem}")
        return True

    # --------------------------------------------------------------------------------------------------- one step

    def _step(self) -> SyncEvent | None:
        start, before = time.monotonic(), self.layout.traffic_with(self.exchange)
        sent, batches = self.exchange.traffic.bytes_sent, self._batches(self.backward.max_micro_batch)
        rate = self._rates.at(self.position.step)
        set_learning_rate(self.optimizer, rate)
        self.last_step.begin()
        self.strategy.begin_step(self.position.step, batches.weight, self.precision.loss_scale)
        batches, losses = self.backward.run(batches, self.strategy, self._batches, self._warn)
        moment = self.member.name, self.position.step + 1
        with self.source.turns.lent():  # nothing is drawn here, and much of it is waiting
            figures = self.update.run(losses, lambda loss: loss_problem(loss, losses, batches, *moment))
            self.optimizer.zero_grad(set_to_none=True)
        if evaluates_local_weights(self.profile.evaluation, self.strategy, self.exchange):
            start += self._evaluate_local_weights()
        self.last_step.stage = "ending"
        self.position.step, self.position.cursor = self.position.step + 1, batches.cursor
        with self.source.turns.lent():
            report = self.strategy.end_step()
            self.average.update()
            self.last_step.stage = "between"
            traffic = self.layout.traffic_with(self.exchange).since(before)
            self.giving_way.rest(time.monotonic() - start - traffic.wait_seconds, self.control.stop_is_near)
        self.compression.step(self.exchange.traffic.bytes_sent - sent)
        self._emit_step(batches, figures, rate, time.monotonic() - start, traffic)
        return report

    def _evaluate_local_weights(self) -> float:
        """Evaluate this member's own weights before the strategy ends a step, if their average is evaluated next, or
        after the last one all splits; return the seconds that it took, which belong to no step."""
        start, step, wait = time.monotonic(), self.position.step + 1, self.strategy.steps_to_average
        is_last = step >= self.total_steps
        if is_last or (wait is not None and 0 < self.position.next_evaluation <= step + wait):
            for event in self.evaluator.evaluate_alone(step, all_splits=is_last):
                self.emit(event)
        return time.monotonic() - start

    def _batches(self, max_micro_batch: int) -> StepBatches:
        """Return this member's batches of the step; ``max_micro_batch`` 0: as large as its batch size."""
        remaining_steps = self.total_steps - self.position.step - 1
        batches = self.source.take(self.position.cursor, self.position.batch_sizes, remaining_steps, max_micro_batch)
        for message in self.samples.take_warnings():
            self._warn(message)
        return batches

    def _emit_step(
        self, batches: StepBatches, figures: StepFigures, rate: float, seconds: float, traffic: Traffic
    ) -> None:
        self.emit(
            StepEvent(
                epoch=self.schedule.epoch_fraction(self.position.cursor, self.position.batch_sizes), loss=figures.loss,
                step=self.position.step, compute=max(0.0, seconds - traffic.wait_seconds), own_norm=figures.own_norm,
                samples=batches.samples * figures.counts, grad_norm=figures.norm, wait=traffic.wait_seconds,
                weight=batches.weight * figures.counts, learning_rate=rate, transfer=traffic.transfer_seconds,
                bytes_sent=traffic.bytes_sent, bytes_received=traffic.bytes_received, stages=self.layout.stage_seconds,
                data=self.source.waited(), gave_way=self.giving_way.rested,
            )
        )  # fmt: skip

    # ------------------------------------------------------------------------------------- what happens between steps

    def _at_synchronisation_point(self) -> None:
        """All members are after the same step here: follow the membership, evaluate, let newcomers in."""
        self.plan = self.control.with_announced(self.plan)
        members = self.layout.members(self.strategy, self.exchange, self.position.step)
        live = {m.rank: m.batch_size for m in self.plan.all_members if m.rank in members}
        self.position.follow(live, self.strategy.unsent_steps)  # who joins tells it, and the run of losses
        if live and self.local:
            for line in self.local.follow(self.plan, list(live), self.exchange, self.position.step):
                if self.rank == min(live):
                    self._warn(line)
        self._evaluate_if_due()
        publishes, self._may_leave = self.layout.agree(self.exchange, self.control.is_dropped)
        if publishes:  # true only on the member that publishes it
            with self.strategy.for_newcomer():
                self.exchange.publish_state(self._joining())

    def _evaluate_if_due(self) -> None:
        interval = self.profile.evaluation.interval_in(self.total_steps)
        if interval and self.position.next_evaluation <= self.position.step < self.total_steps:
            average = self.strategy, self.exchange, f"ema/{self.position.step}", self.settings.ema_evaluated
            with self.strategy.consensus(), self.average.in_use(*average):
                synchronise_buffers(self.model, self.exchange, f"eval/{self.position.step}")
                if self._evaluate([split for split in self.evaluator.splits if split == "validation"]):
                    self.position.next_evaluation = (self.position.step // interval + 1) * interval
                    self.position.cut_short = 0
                else:
                    self.position.note_cut_short()

    def _evaluate(self, splits: list[str], attempt: int = 0) -> bool:
        """Evaluate; return whether the evaluation was completed, which means that no member stopped meanwhile."""
        for split in splits:
            heeds = self.position.cut_short < MOST_CUT_SHORT
            live = self.layout.members(self.strategy, self.exchange)
            members = {rank: self.position.batch_sizes.get(rank, 1) for rank in live}
            event = self.evaluator.evaluate(split, self.position.step, members, attempt, heeds)
            if event is None:
                return False
            if self.rank == min(members):
                self.emit(event)
            if split == "validation" and 0 < self.position.step < self.total_steps and not self.stopping.should_stop:
                self.stopping.note(event.metrics.get(self.task.monitor), event.step, self.model)
                if self.stopping.should_stop and self.rank == min(members):
                    self._warn(f"early stop at step {event.step}: {self.task.monitor} {self.stopping.best_in_words}")
        return True

    def _carry_out_orders(self, at_sync: bool, finishing: bool = False) -> ExitCode | None:
        """Carry out the commands that are due; the finish after the last step counts as one more step."""
        while (command := self.control.next(self.position.step + finishing, at_sync and self._may_leave)) is not None:
            match command.command:
                case "pause":
                    self.emit(RunEvent(status="paused", message=command.reason))
                case "resume":
                    self.emit(RunEvent(status="running", total_steps=self.total_steps))
                case "snapshot":
                    self.control.failure = self._snapshot(wait=True)
                case "stop":
                    if command.snapshot and self.position.step:
                        self._snapshot(wait=True, is_required=True, for_copies=True)
                    self.emit(MemberEvent(status="left", name=self.member.name, message=command.reason))
                    return ExitCode.STOPPED
        return None

    def _name_of(self, rank: int) -> str:
        return self.control.with_announced(self.plan).all_members[rank].name

    def _warn(self, message: str) -> None:
        self.emit(WarningEvent(message=message, step=self.position.step))

    # ------------------------------------------------------------------------------------------- snapshots, newcomers

    def _snapshot(self, wait: bool = False, is_required: bool = False, for_copies: bool = False) -> str:
        """Save what this member needs to go on as if it had never stopped; after a ``wait`` return why it could not."""
        if self.position.step != self.snapshots.own.current:
            check_finite(self.parameters, self.name, self.position.step, self.writer.newest_in_words)
            tensors = prefixed("strategy", self.strategy.tensors()) | self.position.tensors()
            state = {**self.position.state(), "strategy": self.strategy.state(), "data": self.data.model_dump(),
                     "most": self.backward.max_micro_batch, **self.layout.place}  # fmt: skip
            in_background = not self.exchange.shares_process
            self.writer.begin(self.state.snapshot(self.position.step, tensors, state), self.plan.hash(), in_background)
        return self.writer.wait(for_copies, is_required) if wait else ""

    def keep_last_step(self) -> bool:
        """Write a snapshot of the last step after the loss of the group; return whether that was possible."""
        return self.position.step > 0 and self.last_step.keep(lambda: self._snapshot(True, True), self._warn)

    def _restore(self, snapshot: Snapshot) -> None:
        check_unchanged(snapshot.state["data"], self.data, "the run began with", self.member.name if self.local else "")
        for message in change_warnings(snapshot.state["data"], self.data):
            self._warn(message)
        self.state.restore(snapshot)
        if Origin.of(snapshot.state).parts == self.layout.part[1] == 1:  # several devices have the size that suits all
            self.backward.max_micro_batch = int(snapshot.state["most"])
        self.position.load(snapshot.state, snapshot.tensors, self.plan.absent)
        self.position.cut_short = 0  # by the stop before this start
        self.strategy.load(tensors_under("strategy", snapshot.tensors), snapshot.state["strategy"])

    def _joining(self) -> JoiningState:
        tensors = prefixed("strategy", self.strategy.newcomer_tensors()) | self.position.tensors()
        state = {**self.position.state(), "strategy": self.strategy.newcomer_state()}
        state |= {"data": self.shared_data.model_dump(), "holdings": self.local.state() if self.local else {}}
        return self.state.joining(tensors, state)

    def _join(self, joining: JoiningState) -> None:
        state = joining.state
        check_unchanged(state["data"], self.shared_data, "the others have")
        self.state.adopt(joining)
        self.position.batch_sizes = {m.rank: m.batch_size for m in self.control.with_announced(self.plan).all_members}
        self.position.load(state, joining.tensors)
        self.strategy.attach(self.model, self.exchange)
        if (tensors := tensors_under("strategy", joining.tensors)) or state["strategy"]:
            self.strategy.load(tensors, state["strategy"])
        self.emit(MemberEvent(status="joined", name=self.member.name, message=f"at step {self.position.step}"))
