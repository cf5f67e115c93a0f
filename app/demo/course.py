"""The scripted events of a run of the tour.

Times come from the planner's cost model for the chosen plan; losses, word error rates and texts from a training that
was recorded once (``record/README.md``).
"""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import combinations

from pydantic import BaseModel, ConfigDict

from app.demo import RECORD
from app.demo.fixture import HERE, TourMachine, fixture
from distributed.measuring.machine_figures import SpeedFigures
from distributed.measuring.measure import MeasurementResult
from distributed.planning.cost_model import evaluation_seconds
from distributed.planning.documents.document import Figures
from distributed.planning.simulated import ClusterClock, choice_of
from profiles.quantities import error_rate_text, loss_text, span_text
from training.exchange.codecs import codec_by_name
from training.numerics.schedule import run_steps
from training.records.events import (
    EvaluationEvent,
    Event,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    TimingEvent,
    UnknownEvent,
)
from training.records.plan import ClockPlan, RunPlan
from training.simulated.clock import Cost
from training.tasks.outputs.showcase import Showcase

LOG = "log"
"""Pseudo-event kind of a log line."""
VICTIM = "demo-studio"
"""The machine that is lost and returns."""
LOST, AWAY = 0.55, 0.12
"""Share of the steps after which it is lost, and the least share it is away; it returns at a synchronisation."""
START = 9.0
"""Seconds before the first step."""
_SILENCE = 5.0
"""Seconds of silence after which a machine is lost."""
_LOAD_EVERY = 2.0
_UNEVEN = 0.05
"""Largest relative difference of a step's time from the mean."""
_FIRST_PID, _PIDS_APART = 2140, 1217
_SYNCS_REPORTED_EVERY = 10
_COORDINATOR = "192.168.7.20"


class RecordedTraining(BaseModel):
    """The recorded training."""

    model_config = ConfigDict(frozen=True)

    losses: tuple[tuple[float | None, ...], ...]
    """Losses by member and step; ``None``: the member was away."""
    norms: tuple[float | None, ...]
    """Gradient norms by step."""
    evaluations: tuple[EvaluationEvent, ...]
    showcase: Showcase

    @property
    def steps(self) -> int:
        return len(self.norms)

    def loss(self, rank: int, share: float) -> float:
        """Return a member's loss after a share of the run; another member's if it was away or was not recorded."""
        step = min(self.steps - 1, int(share * self.steps))
        step_losses = [losses[step] for losses in self.losses]
        recorded_losses = [loss for loss in step_losses if loss is not None]
        return step_losses[rank % len(step_losses)] or recorded_losses[rank % len(recorded_losses)]

    def evaluation(self, split: str, share: float) -> EvaluationEvent:
        """Return the evaluation of a split that was made nearest to a share of the run; at its start, the first one."""
        made = [result for result in self.evaluations if result.split == split and bool(result.step) == bool(share)]
        return min(made, key=lambda result: abs(result.step / self.steps - share))

    def norm(self, share: float) -> float | None:
        return self.norms[min(self.steps - 1, int(share * self.steps))]


@lru_cache
def recorded_training() -> RecordedTraining:
    with gzip.open(RECORD / "course.json.gz") as stream:
        return RecordedTraining.model_validate_json(stream.read())


def figures_of(names: Sequence[str]) -> Figures:
    """Return the recorded measurements of these machines."""
    measurement = MeasurementResult(list(names), local_name=HERE)
    measurement.pairs = [fixture().pair(source, target) for source, target in combinations(names, 2)]
    speeds = {machine.name: machine.speed for machine in fixture().machines}
    measurement.speeds = [SpeedFigures(machine=speeds[name], workload=fixture().workload) for name in names]
    return measurement.figures


class TourScript:
    """Generates the events of one run in chronological order.

    Args:
        plan: plan of the run; its members are machines of the tour.
        seed: seed of the random variation between steps.
    """

    def __init__(self, plan: RunPlan, seed: int = 0) -> None:
        self._plan, self._course = plan, recorded_training()
        names = [member.name for member in plan.members]
        machines_by_name = {machine.name: machine for machine in fixture().machines}
        self._machines: list[TourMachine] = [machines_by_name[name] for name in names]
        machines = figures_of(names).model_dump(mode="json")
        self._clock = ClusterClock(plan.model_copy(update={"clock": ClockPlan(made_by="", machines=machines)}))
        self._random = random.Random(seed)
        self._time = 0.0
        self._live = set(range(len(names)))
        self._victim = names.index(VICTIM) if VICTIM in names[1:] else None
        self._loads_at = 0.0
        self._began = self._snapshot_at = START

    @cached_property
    def _steps(self) -> int:
        training = self._plan.profile.training
        samples, batch = fixture().workload.samples, self._plan.global_batch
        return run_steps(samples, batch, training.epochs, training.drop_last, training.max_steps).steps

    @property
    def _trainable(self) -> int:
        return fixture().workload.trainable

    @property
    def _interval(self) -> int:
        """Steps between two reported synchronisations."""
        if self._plan.world_size == 1:
            return self._steps + 1
        interval = self._clock.cost(tuple(sorted(self._live)), self._trainable, self._steps).interval
        return interval if interval > 1 else _SYNCS_REPORTED_EVERY

    def events(self) -> list[Event]:
        """Return all events, with times in seconds since the start of the run."""
        events = [*self._start(), *self._evaluated(0)]
        self._began = self._time
        for step in range(1, self._steps + 1):
            events += self._step(step)
        events += self._evaluated(self._steps)
        for rank in sorted(self._live):
            events.append(self._member(rank, "done"))
        return sorted(events, key=lambda event: event.time)

    # --------------------------------------------------------------------------------------------------------- start

    def _start(self) -> Iterator[Event]:
        yield TimingEvent(time=0.3, part="machines: checked", seconds=0.3)
        yield RunEvent(time=0.5, status="starting")
        size = fixture().input_bytes
        for rank, machine in enumerate(self._machines):
            for fifths in range(6 if machine.name != HERE else 0):  # it has the files
                done = size * fifths // 5
                at = 0.8 + 0.6 * fifths + 0.03 * rank
                yield ProgressEvent(time=at, member=rank, phase=f"bytes to {machine.name}", done=done, total=size)
            begun = 5.2 + 0.1 * rank
            yield self._member(rank, "started", begun, message=f"pid {_FIRST_PID + _PIDS_APART * rank}")
            yield self._load(rank, begun + 0.1)
            for split in ("train", "validation", "test"):
                count = fixture().data["splits"][split]
                phase = f"preparing the recordings ({split})"
                yield ProgressEvent(time=begun + 2.4, member=rank, phase=phase, done=count, total=count)
            yield self._member(rank, "joined", begun + 2.8)
            yield _log(begun + 2.8, "coordinator", f"INFO {machine.name} joined")
            yield self._member(rank, "ready", START - 0.1, device=machine.speed.device)
        details = {"step": 0, "trainable": self._trainable}
        yield RunEvent(time=START, status="running", total_steps=self._steps, details=details)
        self._time = START

    def _member(self, rank: int, status: str, at: float | None = None, **fields: str) -> MemberEvent:
        time = self._time if at is None else at
        name = self._machines[rank].name
        return MemberEvent.model_validate({"time": time, "member": rank, "status": status, "name": name, **fields})

    # --------------------------------------------------------------------------------------------------------- steps

    def _step(self, step: int) -> Iterator[Event]:
        if self._victim is not None and step == self._lost_at:
            yield from self._lose(self._victim)
        live = sorted(self._live)
        cost = self._clock.cost(tuple(live), self._trainable, self._steps)
        self._time += cost.seconds
        for rank in live:
            yield self._worked(rank, step, cost)
        if step % self._interval == 0:
            yield from self._synchronised(step, cost)
        if self._time >= self._loads_at:
            self._loads_at = self._time + _LOAD_EVERY
            yield from (self._load(rank, self._time) for rank in live)
        if step < self._steps and self._is_snapshot_due(step, cost):
            self._snapshot_at = self._time
            yield from (self._snapshot(rank, step) for rank in live)
        yield from self._evaluated(step) if step < self._steps else ()
        if step == self._back_at and self._victim is not None:
            yield from self._return(self._victim)

    def _worked(self, rank: int, step: int, cost: Cost) -> StepEvent:
        samples = self._plan.members[rank].batch_size * self._plan.profile.training.gradient_accumulation
        uneven = 1 + self._random.uniform(-_UNEVEN, _UNEVEN)
        compute = min(cost.busy[rank] * uneven, cost.seconds)
        share = (step - 1) / self._steps
        size = self._bytes if step % cost.interval == 0 else 0
        return StepEvent(
            time=self._time,
            member=rank,
            step=step,
            epoch=step * self._plan.global_batch / fixture().workload.samples,
            loss=self._course.loss(rank, share),
            learning_rate=self._plan.profile.training.learning_rate * min(1.0, step / 10) * (1 - share),
            samples=samples,
            weight=float(samples),
            compute=compute,
            wait=cost.seconds - compute if len(self._live) > 1 else 0.0,
            transfer=cost.exchange / cost.interval,
            grad_norm=self._course.norm(share),
            bytes_sent=size,
            bytes_received=size,
        )

    @property
    def _bytes(self) -> int:
        """Mean bytes that a member sends in one synchronisation."""
        count = len(self._live)
        names = tuple(member.name for member in self._plan.members)
        codec = codec_by_name(choice_of(self._plan.profile, names).codec)
        both_ways = codec.expected_bytes(self._trainable) + codec.expected_reply_bytes(self._trainable, count)
        return math.ceil((count - 1) / count * both_ways)

    def _synchronised(self, step: int, cost: Cost) -> Iterator[SyncEvent]:
        if len(self._live) < 2:
            return
        waits = {rank: cost.interval * cost.wait(rank) for rank in sorted(self._live)}
        transfer = cost.exchange * (1 + self._random.uniform(0, _UNEVEN))
        for rank, wait in waits.items():
            yield SyncEvent(
                time=self._time,
                member=rank,
                step=step,
                round=step // self._interval,
                bytes_sent=self._bytes,
                bytes_received=self._bytes,
                seconds=transfer + wait - min(waits.values()),  # who came earlier waited for the last as well
                wait=wait,
                members=sorted(self._live),
                weight_hash=f"{random.Random(step).getrandbits(64):016x}",
                drift=0.0,
            )

    def _evaluated(self, step: int) -> Iterator[Event]:
        """Yield the evaluations that are due after a step, as events of the first machine."""
        live = sorted(self._live)
        batches = [self._plan.members[rank].batch_size for rank in live]
        costs = [self._machines[rank].speed.evaluation for rank in live]
        for split in self._splits_due(step):
            evaluation = self._course.evaluation(split, step / self._steps)
            seconds = evaluation_seconds(evaluation.samples, batches, costs)
            self._time += seconds
            yield evaluation.model_copy(update={"time": self._time, "member": 0, "step": step, "seconds": seconds})
            figures = f"WER {error_rate_text(evaluation.metrics['wer'])}, loss {loss_text(evaluation.loss)}"
            line = f"INFO {evaluation.split} at step {step}: {figures}"
            yield _log(self._time, self._machines[0].name, line)

    def _splits_due(self, step: int) -> tuple[str, ...]:
        interval = self._plan.profile.evaluation.interval_in(self._steps)
        if step in (0, self._steps):
            return tuple(fixture().workload.evaluated)
        return ("validation",) if interval and step % interval == 0 else ()

    def _is_snapshot_due(self, step: int, cost: Cost) -> bool:
        settings = self._plan.profile.snapshot
        if settings.steps:
            return step % settings.steps == 0
        return 0 < settings.seconds_in(self._steps * cost.seconds) <= self._time - self._snapshot_at

    def _snapshot(self, rank: int, step: int) -> SnapshotEvent:
        path = f"checkpoints/member-{rank}/step-{step:08d}"
        size = 12 * self._trainable
        live = tuple(sorted(self._live))
        return SnapshotEvent(time=self._time, member=rank, step=step, path=path, bytes=size, seconds=0.4, live=live)

    def _load(self, rank: int, at: float) -> MachineEvent:
        """Return invented readings of a machine: temperature, power, memory."""
        machine = self._machines[rank]
        worked = max(0.0, at - self._began)
        heat = 1 - math.exp(-worked / 40)
        readings: dict[str, object] = {}
        if machine.speed.system == "linux":
            readings["celsius"] = round(41 + 33 * heat, 1)
        if machine.speed.device == "cuda":
            watts = 120.0 + 40 * heat
            readings |= {"throttled": False, "watts": round(watts), "joules": round(watts * worked), "meters": ("gpu",)}
        if machine.health.power.source == "battery":
            readings |= {"battery_percent": round(64 - worked / 90, 1), "on_mains": False}
        memory = machine.speed.measurements[0].peak
        figures = {"cpu_percent": 38.0 + 9 * (rank % 4), "memory_used": memory, "memory_total": machine.memory}
        return MachineEvent.model_validate({"time": at, "member": rank, **figures, **readings})

    # --------------------------------------------------------------------------------------------- loss and return

    @property
    def _lost_at(self) -> int:
        return max(2, round(LOST * self._steps))

    @property
    def _back_at(self) -> int:
        """The first synchronisation at least ``AWAY`` after the loss."""
        return math.ceil((self._lost_at + AWAY * self._steps) / self._interval) * self._interval

    def _lose(self, rank: int) -> Iterator[Event]:
        machine, at = self._machines[rank], self._time + _SILENCE
        self._live.discard(rank)
        yield _log(self._time, machine.name, f"ERROR network: {machine.interface}: link is down")
        broke = f"ERROR exchange: has lost the machine that holds the run together ({_COORDINATOR}): No route to host"
        yield _log(self._time + 1.5, machine.name, broke)
        yield self._member(rank, "lost", at, message=f"silent for {span_text(_SILENCE)}")
        yield _log(at, "coordinator", f"WARNING {machine.name}: silent for {span_text(_SILENCE)}; dropped")

    def _return(self, rank: int) -> Iterator[Event]:
        name = self._machines[rank].name
        request = {"request": "tour-add", "action": "add", "machine": name}
        before = self._time - 4.0
        yield RequestEvent(time=before, outcome="accepted", **request)
        pid = _FIRST_PID + _PIDS_APART * rank + 58
        yield self._member(rank, "started", before + 0.5, message=f"pid {pid}")
        yield self._member(rank, "joined", before + 2.5, message="joins a running group")
        yield self._member(rank, "ready", message="has the group's weights")
        yield RequestEvent(time=self._time, outcome="done", message="trains with the others", **request)
        self._live.add(rank)


def _log(at: float, name: str, text: str) -> UnknownEvent:
    return UnknownEvent.model_validate({"time": at, "kind": LOG, "log": name, "text": text})
