"""``muster.session()``: a training loop of one's own, with a strategy, snapshots, events and the dashboard of a run.

::

    import muster

    session = muster.session(strategy="diloco", max_steps=10_000, snapshot_interval=500)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for inputs, target in loader:
        optimizer.zero_grad()
        session.backward(loss_of(model(inputs), target))  # instead of loss.backward()
        session.step()                                    # instead of optimizer.step()

``muster launch --local 2 train.py`` starts it, here or on other machines. Started by ``python`` it trains alone; by
``torchrun`` it trains with a strategy too, but has no run folder, and so no snapshots.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from profiles.errors import BadInput, ExitCode, RunFailed
from profiles.schema import Profile
from training.exchange.base import Exchange, Traffic
from training.hardware.device import select_device
from training.loop.position import EarlyStopping, Position
from training.loop.resuming import agree_on_snapshot
from training.loop.state import prefixed, synchronise_buffers
from training.loop.update import StepFigures
from training.numerics.randomness import rng_state
from training.optimization.backward import refuse_untrained
from training.records.events import EvaluationEvent, MemberEvent, RunEvent, StepEvent, WarningEvent
from training.records.plan import RunPlan
from training.session.launched_run import LaunchedRun, group_of_script
from training.session.packed_state import StatefulObjects
from training.session.prepared_loader import PreparedLoader
from training.session.session_options import StrategyChoice, session_profile, strategy_of_loop
from training.session.trained_part import TrainedPart
from training.session.untrained_weights import UntrainedModules
from training.snapshots.member_snapshots import MemberSnapshots
from training.snapshots.snapshot_pace import SnapshotPace
from training.snapshots.snapshot_store import Snapshot
from training.snapshots.snapshot_writer import SnapshotWriter
from training.strategies.base import StrategyContext
from training.strategies.costs import start_of


def session(strategy: StrategyChoice = "auto", **options: Any) -> Session:
    """Begin the training of this process, in the group that launched it.

    Args:
        strategy: as :meth:`training.local_trainer.ObjectTrainer.fit` takes it; ``auto``: gradients are averaged.
        options: of the strategy and of snapshots, ``max_steps`` (all steps; the last one ends the session),
            ``max_grad_norm`` (default 0: nothing is clipped), ``seed`` and ``device``.

    Raises:
        BadInput: an unknown option, one that a session does not read, or a strategy that a loop cannot have.
    """
    return Session(session_profile(strategy, options), LaunchedRun.of_environment())


class Session:
    """One process's training; see :func:`session`. All processes call the same methods in the same order.

    Args:
        connect: returns a new exchange with the others; each optimizer has one.
    """

    def __init__(
        self, profile: Profile, run: LaunchedRun, connect: Callable[[LaunchedRun], Exchange] = group_of_script
    ) -> None:
        self._profile, self._run, self._connect = profile, run, connect
        self._settings, self._kind = strategy_of_loop(profile)
        self.device = select_device(profile.training.device, run.local_rank)
        self._plan = run.plan_of(profile)
        self._position = Position(EarlyStopping(0, 0.0), batch_sizes=dict.fromkeys(range(run.world_size), 1))
        self._parts: list[TrainedPart] = []
        self._modules: list[nn.Module] = []
        self._loader: PreparedLoader | None = None
        self._untrained, self._stateful = UntrainedModules(), StatefulObjects()
        self._losses: list[torch.Tensor] = []
        self._snapshot: Snapshot | None = None
        """The one that the run continues from."""
        self._writer: SnapshotWriter | None = None
        self._ending = contextlib.ExitStack()
        self._finished = self._is_between = self._is_due = False
        self._random: dict[str, torch.Tensor] = {}
        """State of the random generators after the step, where a snapshot of it may be written."""

    @property
    def num_processes(self) -> int:
        """How many processes train together."""
        return self._run.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process, from 0."""
        return self._run.rank

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that prints and saves for all."""
        return not self._run.rank

    @property
    def completed_steps(self) -> int:
        """Steps of the run so far; after a resume not 0."""
        return self._position.step

    @property
    def completed_epochs(self) -> int:
        """Number of the pass over the first loader that begins next; after a resume of the one to continue."""
        return self._loader.next_epoch if self._loader is not None else 0

    # ------------------------------------------------------------------------------------------------------- prepare

    def prepare(self, *objects: Any) -> Any:
        """Take over modules, their optimizers, schedulers and loaders; return them in the same order.

        Modules are moved to :attr:`device` and hold the same weights on all processes. Each optimizer trains whole
        modules that are prepared with it or before; weights that none trains are the script's. A loader gives this
        process its part of the batches, on its device. A resumed run continues from its newest snapshot: weights,
        optimizers, schedulers, place in the data, random numbers.

        Raises:
            BadInput: something else, or an optimizer whose weights are in no module.
            RunFailed: the run is resumed, and its snapshot is of another script.
        """
        self._add_modules([thing for thing in objects if isinstance(thing, nn.Module)])
        for thing in objects:
            if isinstance(thing, torch.optim.Optimizer) and all(part.optimizer is not thing for part in self._parts):
                self._add_part(thing)
        prepared = [self._prepared(thing) for thing in objects]
        if self._parts:
            self._untrained.add(self._of_no_optimizer(), self._parts[0].exchange, self._snapshot)
            self._stateful.restore(self._snapshot)
            self._run.control.arrive(self._position.step)
        self._begin_timing()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _add_modules(self, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                problem = "DistributedDataParallel merges gradients itself, as the strategy does"
                raise BadInput(problem, "prepare the module without it")
            if all(module is not other for other in self._modules):
                self._modules.append(module.to(self.device))

    def _of_no_optimizer(self) -> dict[int, nn.Module]:
        trained = {module for part in self._parts for module in part.modules}
        return {number: module for number, module in enumerate(self._modules) if module not in trained}

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module | torch.optim.Optimizer):
            return thing
        if isinstance(thing, PreparedLoader):  # of an earlier session
            thing = thing.loader
        if isinstance(thing, DataLoader):
            run, seed = self._run, self._profile.training.seed
            thing = PreparedLoader(thing, run.rank, run.world_size, self.device, seed, self._between_steps)
            self._loader = self._loader or thing
        elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            kinds = "modules, optimizers, schedulers and DataLoaders"
            raise BadInput(f"prepare() takes {kinds}, not {type(thing).__name__}", "leave it out")
        self._stateful.add(thing)
        return thing

    def _add_part(self, optimizer: torch.optim.Optimizer) -> None:
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        modules = [module for module in self._modules if held & {*module.parameters()}]
        of_modules = {parameter for module in modules for parameter in module.parameters()}
        if held - of_modules:
            problem = f"{type(optimizer).__name__} has weights of no module that was prepared"
            raise BadInput(problem, "prepare the module together with its optimizer")
        if of_modules & {parameter for part in self._parts for parameter in part.parameters}:
            problem = "two optimizers have weights of one module"
            raise BadInput(problem, "give each a module of its own, or one optimizer several parameter groups")
        training, start = self._profile.training, start_of(self._profile)
        context = StrategyContext(
            self._settings, training.max_steps, training.seed, self._warn, start, training.max_grad_norm
        )
        exchange = self._connect(self._run)
        part = TrainedPart(len(self._parts), modules, optimizer, self._kind, context, exchange, self.device)
        if not self._parts and self._plan is not None:
            self._begin_run(self._plan, exchange)
        self._parts.append(part)
        part.attach(self._snapshot)

    def _begin_run(self, plan: RunPlan, exchange: Exchange) -> None:
        """Tell the run that this script trains in a session; find the snapshot that a resumed one continues from."""
        run = self._run
        sections = self._profile.model_dump(mode="json", include={"training", "strategy", "snapshot"})
        total = self._profile.training.max_steps
        run.emit(RunEvent(status="running", total_steps=total or None, details={"session": sections}))
        snapshots = MemberSnapshots(run.run_dir / "checkpoints", plan, run.rank)
        writer = self._writer = SnapshotWriter(snapshots.own, self.device, run.name, run.emit, run.run_dir)
        self._position.pace = SnapshotPace(self._profile.snapshot, writer, exchange, total_steps=total)
        if plan.resume:
            agreed = agree_on_snapshot(snapshots.to_check, exchange, self._warn, plan.hash())
            if (parts := agreed.parts) is None:
                raise RunFailed(f"{run.name} has no snapshot of step {agreed.step}", "start a new run")
            self._snapshot = snapshots.load(parts.step, plan.hash(), parts.origin, lambda name: True)
            self._position.load(self._snapshot.state, {})
        self._position.begin(plan.attempt)
        atexit.register(self._warn_unmerged)

    # --------------------------------------------------------------------------------------------------------- a step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, and add them to those of this step.

        Args:
            loss: a scalar; of several passes for one step each its share, as usual: ``loss / passes``.
        """
        if not self._parts:
            raise BadInput("backward() before prepare()", "call session.prepare(model, optimizer) first")
        refuse_untrained(loss)
        self._between_steps()
        if self._losses and not any(part.has_gradients for part in self._parts):
            self._losses.clear()  # of a step that the script has left out
        for part in self._parts:
            part.begin_step()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._losses.append(loss.detach())

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Make a step of an optimizer with the gradients that are there, merged as the strategy says.

        With several optimizers, the steps of the first one are those of the run: snapshots are written after them.

        Args:
            optimizer: which; may be left out if there is one.

        Raises:
            SystemExit: the run was stopped; its snapshot is written.
            RunFailed: the loss is not finite, or a snapshot cannot be written.
            BadInput: there was no :meth:`backward` for it.
        """
        part = self._part_of(optimizer)
        losses, self._losses = self._losses, []
        figures, report = part.step(losses, self._refuse_loss)
        if part is not self._parts[0]:
            return
        self._position.step = step = part.steps
        self._emit_step(part, figures)
        if report is not None:
            self._run.emit(part.compression.complete_report(report, step))
        self._is_between, pace = self._writer is not None, self._position.pace
        self._is_due = pace is not None and pace.is_due(step, part.strategy.meets(report))
        if self._is_between and (self._is_due or self._run.control.has_work_by(step)):
            self._random = rng_state(self.device)
        if step == self._profile.training.max_steps:
            self.finish()
        self._begin_timing()

    def _between_steps(self) -> None:
        """Write the snapshot that is due, and carry out orders: when the script has done what it does after a step, as
        with its scheduler, and fetches its next batch or computes its next gradients."""
        if not self._is_between or self._finished or self._writer is None:
            return
        self._is_between = False
        self._writer.check()
        if self._is_due:
            self._write_snapshot()
        self._carry_out_orders()
        self._random = {}
        self._begin_timing()

    def _part_of(self, optimizer: torch.optim.Optimizer | None) -> TrainedPart:
        if self._finished:
            raise RunFailed("the session has ended: a step after its last one", "raise max_steps, or end the loop")
        parts = [part for part in self._parts if optimizer in (None, part.optimizer)]
        if len(parts) != 1:
            problem = f"step() of {len(self._parts)} optimizers" if optimizer is None else "step() of another optimizer"
            raise BadInput(problem, "call session.step(optimizer) with one that was prepared")
        return parts[0]

    def _refuse_loss(self, loss: float) -> str:
        if not math.isfinite(loss):
            snapshot = self._writer.newest_in_words() if self._writer is not None else "nothing is saved"
            problem = f"the loss of {self._run.name} is {loss} in step {self._position.step + 1}; {snapshot}"
            raise RunFailed(problem, "lower the learning rate, or set max_grad_norm = 1")
        return ""

    def _begin_timing(self) -> None:
        self._began, self._before = time.monotonic(), self._traffic()

    def _traffic(self) -> Traffic:
        return functools.reduce(Traffic.plus, (part.exchange.traffic for part in self._parts), Traffic())

    def _emit_step(self, part: TrainedPart, figures: StepFigures) -> None:
        traffic, loader = self._traffic().since(self._before), self._loader
        samples, waited = loader.take_counts() if loader is not None else (0, 0.0)
        seconds = time.monotonic() - self._began
        self._run.emit(
            StepEvent(
                step=self._position.step, epoch=loader.epochs if loader is not None else 0.0, loss=figures.loss,
                learning_rate=part.learning_rate, samples=samples, weight=samples or 1, wait=traffic.wait_seconds,
                compute=max(0.0, seconds - traffic.wait_seconds), transfer=traffic.transfer_seconds, data=waited,
                grad_norm=figures.norm, own_norm=figures.own_norm,
                bytes_sent=traffic.bytes_sent, bytes_received=traffic.bytes_received,
            )
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ between two steps

    def log(self, metrics: Mapping[str, float], split: str = "validation", samples: int = 0) -> None:
        """Add figures of this step to the run's charts, report and trackers, from the main process.

        Args:
            metrics: by name; ``loss`` is shown beside that of training.
            samples: that they were measured on.
        """
        if self.is_main_process:
            figures = {name: float(value) for name, value in metrics.items()}
            self._run.emit(EvaluationEvent(
                step=self._position.step, split=split, loss=figures.get("loss"), metrics=figures, samples=samples,
                seconds=0.0,
            ))  # fmt: skip

    @contextlib.contextmanager
    def merged_weights(self) -> Iterator[None]:
        """Hold in the modules what all processes have learned, to be evaluated or saved; afterwards each has its own.

        All processes enter it together, after the same step.
        """
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.merged())
            yield

    def finish(self) -> None:
        """End the training: merge what is not merged yet, and hold the result in the modules. Idempotent.

        All processes call it together; with ``max_steps`` the last step does.
        """
        if self._finished:
            return
        self._finished = True
        for part in self._parts:
            report = part.strategy.finish()
            if report is not None and part is self._parts[0]:
                self._run.emit(part.compression.complete_report(report, self._position.step))
            self._ending.enter_context(part.strategy.consensus())
            synchronise_buffers(part.module, part.exchange, "finish")
        if self._writer is not None:
            self._writer.wait()

    def _carry_out_orders(self) -> None:
        at_sync = all(part.strategy.synchronised for part in self._parts)
        while (command := self._run.control.next(self._position.step, at_sync)) is not None:
            match command.command:
                case "pause":
                    self._run.emit(RunEvent(status="paused", message=command.reason))
                case "resume":
                    self._run.emit(RunEvent(status="running", total_steps=self._profile.training.max_steps or None))
                case "snapshot":
                    self._run.control.failure = self._write_snapshot(wait=True)
                case "stop":
                    if command.snapshot:
                        self._write_snapshot(wait=True, is_required=True)
                    self._run.emit(MemberEvent(status="left", name=self._run.name, message=command.reason))
                    self._finished = True
                    raise SystemExit(int(ExitCode.STOPPED))

    def _write_snapshot(self, wait: bool = False, is_required: bool = False) -> str:
        if self._writer is None or self._plan is None:
            return ""
        untrained, hashes = self._untrained.snapshot(self._of_no_optimizer())
        state = {**self._position.state(), "parts": {}, "untrained": hashes}
        everything = prefixed("rng", self._random or rng_state(self.device)) | self._stateful.snapshot() | untrained
        for part in self._parts:
            tensors, states = part.snapshot()
            everything |= tensors
            state["parts"] |= states
        self._writer.begin(Snapshot(self._position.step, everything, state), self._plan.hash())
        return self._writer.wait(is_required=is_required) if wait else ""

    def _warn_unmerged(self) -> None:
        """At the end of the process: what a script that has not failed has learned and left unmerged."""
        failed = getattr(sys, "last_value", None) is not None
        if not (self._finished or failed or all(part.strategy.synchronised for part in self._parts)):
            self._warn("the script ended without session.finish(): its processes hold different weights")

    def _warn(self, message: str) -> None:
        self._run.emit(WarningEvent(message=message, step=self._position.step))
