"""The script of a training: steps, synchronisations, evaluations, snapshots, and a machine that is lost and comes back.

Members run side by side, each on a clock of its own; where they meet (a synchronisation, an evaluation) all wait for
the slowest, so that the shares of waiting and transfer on the screen follow from the machines' figures.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from app.demo import mishap
from app.demo.beats import Beat, LogLine, dice
from app.demo.curves import evaluation_at, gradient_norm_at, learning_rate_at, loss_at
from app.demo.job import SAMPLES, TRAINABLE
from app.demo.machine_load import load_event
from app.demo.machines import ScriptedMachine, scripted_machine
from distributed.planning.cost_model import payload_bytes
from training.events import EvaluationEvent, Event, MemberEvent, RunEvent, StepEvent, SyncEvent
from training.events import SnapshotEvent as Snapshot
from training.plan import MemberPlan, RunPlan
from training.strategies.registry import strategy_class, usual_strategy

EVALUATION_SECONDS = 1.6
SNAPSHOT_BYTES = 46_000_000
LOAD_INTERVAL = 4.0
_REPORTS = 50
"""Who synchronises in every step reports every so many rounds."""


@dataclass
class Member:
    """One member on its own clock."""

    plan: MemberPlan
    machine: ScriptedMachine
    chance: random.Random
    clock: float
    next_load: float = 0.0
    here: bool = True
    """Whether the others see it."""

    @property
    def rank(self) -> int:
        return self.plan.rank


class TrainingScript:
    """Writes the beats of one training.

    Args:
        plan: who trains, and how.
        seed: of all chances.
        start: when the last member is ready, in seconds since the start of the script.
    """

    def __init__(self, plan: RunPlan, seed: int, start: float) -> None:
        self.plan = plan
        self.seed = seed
        self.start = start
        self.beats: list[Beat] = []
        training, strategy = plan.profile.training, plan.profile.strategy
        self.total = training.max_steps or max(1, round(training.epochs * SAMPLES / plan.global_batch))
        chosen = strategy_class(usual_strategy() if strategy.strategy == "auto" else strategy.strategy)
        self.rhythm = chosen.rhythm(strategy)
        self.payload = round(payload_bytes(TRAINABLE, chosen.codec(strategy)))
        self.members = [
            Member(member, scripted_machine(member.name), dice(seed, "steps", member.rank), start)
            for member in plan.members
        ]
        self.mishap = mishap.plan_mishap(self.members, plan, self.total)
        self.round = 0
        self.samples = 0

    @property
    def live(self) -> list[Member]:
        """Members that the others see."""
        return [member for member in self.members if member.here]

    def write(self) -> list[Beat]:
        """Return all beats, in no order."""
        first = self.members[0]
        self._say(first, RunEvent(status="running", total_steps=self.total, details={"step": 0}))
        if self.plan.profile.evaluation.eval_before:
            self._evaluate(0, ("validation", "test"))
        for step in range(1, self.total + 1):
            self._step(step)
        self._evaluate(self.total, ("validation", "test"))
        for member in self.live:
            self._say(member, MemberEvent(status="left", name=member.plan.name))
            self._say(member, MemberEvent(status="done", name=member.plan.name))
        return self.beats

    def _step(self, step: int) -> None:
        live, meets = self.live, self._meets(step)
        computes = {member.rank: self._compute(member) for member in live}
        for member in live:
            member.clock += computes[member.rank]
        arrivals = {member.rank: member.clock for member in live}
        transfer = self._meet(step, live) if meets else 0.0
        self.samples += sum(self._samples(member) for member in live)
        for member in live:
            wait = member.clock - arrivals[member.rank]
            self._say(member, self._step_event(step, member, computes[member.rank], wait, transfer))
        self.beats += mishap.beats_of(self.mishap, self.members, step, meets)
        self._after(step)

    def _after(self, step: int) -> None:
        evaluation, snapshots = self.plan.profile.evaluation.eval_interval, self.plan.profile.snapshot.snapshot_interval
        for member in self.live:
            if snapshots and step % snapshots == 0:
                self._say(member, snapshot_event(member.rank, step))
            if member.clock >= member.next_load:
                member.next_load = member.clock + LOAD_INTERVAL
                self._say(member, load_event(member.machine, member.chance, member.clock, self.start))
        if evaluation and step % evaluation == 0 and step < self.total:
            self._evaluate(step, ("validation",))

    def _meets(self, step: int) -> bool:
        return len(self.members) > 1 and (step % self.rhythm.interval == 0 or step == self.total)

    def _samples(self, member: Member) -> int:
        return member.plan.batch_size * self.plan.profile.training.gradient_accumulation

    def _compute(self, member: Member) -> float:
        machine, accumulated = member.machine, self.plan.profile.training.gradient_accumulation
        once = machine.overhead + member.plan.batch_size / machine.speed
        return accumulated * once * (1 + abs(member.chance.gauss(0.0, 0.04)))

    def _meet(self, step: int, live: list[Member]) -> float:
        """Let all wait for the slowest and exchange; return the seconds of the exchange."""
        self.round += 1
        slowest = max(self._sending(member) for member in live)
        seconds = 0.03 + slowest * (1 + abs(self.members[0].chance.gauss(0.0, 0.12)))
        barrier = max(*(member.clock for member in live), self.mishap.silence_ends if self.mishap else 0.0)
        hidden = self.rhythm.delay * self._mean_compute(live)
        waits = [max(0.0, barrier + seconds - member.clock - hidden) for member in live]
        for member, wait in zip(live, waits):
            member.clock += wait
            if self.rhythm.interval > 1 or self.round % _REPORTS == 0:
                own = seconds * (0.8 + 0.2 * self._sending(member) / slowest)
                self._say(member, self._sync_event(step, live, own, wait))
        return seconds

    def _sending(self, member: Member) -> float:
        """Return the seconds that a member's link needs for its payload, there and back."""
        return self.payload * 16 / (member.machine.mbit * 0.85e6)

    def _mean_compute(self, live: list[Member]) -> float:
        return sum(member.machine.overhead + member.plan.batch_size / member.machine.speed for member in live) / len(
            live
        )

    def _sync_event(self, step: int, live: list[Member], seconds: float, wait: float) -> SyncEvent:
        return SyncEvent(
            step=step,
            round=self.round,
            bytes_sent=self.payload,
            bytes_received=self.payload,
            seconds=seconds,
            wait=wait,
            members=[member.rank for member in live],
            weight_hash=hashlib.sha256(f"{self.seed}/{self.round}".encode()).hexdigest()[:16],
        )

    def _step_event(self, step: int, member: Member, compute: float, wait: float, transfer: float) -> StepEvent:
        share = step / self.total
        samples = self._samples(member)
        moved = self.payload if transfer else 0
        return StepEvent(
            step=step,
            epoch=self.samples / SAMPLES,
            loss=loss_at(share, member.chance),
            learning_rate=learning_rate_at(step, self.total, self.plan.profile.training),
            samples=samples,
            weight=float(samples),
            compute=compute,
            wait=wait,
            transfer=transfer,
            grad_norm=gradient_norm_at(share, member.chance),
            bytes_sent=moved,
            bytes_received=moved,
        )

    def _evaluate(self, step: int, splits: tuple[str, ...]) -> None:
        live = self.live
        for split in splits:
            at = max(member.clock for member in live) + EVALUATION_SECONDS
            for member in live:
                member.clock = at
            figures = evaluation_at(step / self.total, split, dice(self.seed, "evaluation", split, step))
            event = EvaluationEvent(
                step=step, split=split, loss=figures["loss"], metrics=figures, samples=240, seconds=EVALUATION_SECONDS
            )
            self._say(live[0], event)
            line = f"INFO {split} at step {step}: WER {figures['wer']:.1%}, loss {figures['loss']:.3f}"
            self.beats.append(Beat(at, LogLine(live[0].plan.name, line)))

    def _say(self, member: Member, event: Event) -> None:
        self.beats.append(Beat(member.clock, event.model_copy(update={"member": member.rank})))


def snapshot_event(rank: int, step: int) -> Snapshot:
    """Return what a member says of a snapshot."""
    path = f"checkpoints/member-{rank}/step-{step:08d}"
    return Snapshot(member=rank, step=step, path=path, bytes=SNAPSHOT_BYTES, seconds=0.21)
