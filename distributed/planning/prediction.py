"""Predicts step time, traffic, memory and learning of one candidate plan."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from distributed.planning import cost_model
from distributed.planning.documents.cluster import Cluster, ClusterMachine
from distributed.planning.documents.corrections import NO_CORRECTIONS, Corrections, average_equal_machines
from distributed.planning.documents.document import Candidate, Choice, Job, MemberForecast, PredictedOutcome, Reason
from distributed.planning.exchange_cost import ExchangeCosts, ExchangeForecast
from distributed.planning.memory import memory_model
from profiles.declarations import OptionsByOwner
from profiles.errors import BadInput
from training.data.sample_order import apportion
from training.numerics.schedule import RunSteps
from training.strategies.costs import Compute, CostModel, RunSpec, SyncSchedule, batch_efficiency
from training.strategies.registry import cost_model as costs_of
from training.strategies.registry import default_strategy, strategies, strategy_class


@dataclass(frozen=True)
class BatchSplit:
    """The split of a step's samples over the members of a group."""

    batches: Mapping[str, int]
    """Micro-batches by member."""
    accumulation: int
    seconds: Mapping[str, float]
    """Mean seconds of each member's steps."""
    fits: bool
    """Whether every member has the memory for its batch."""

    @property
    def compute(self) -> float:
        """Mean seconds of the slowest member's steps."""
        return max(self.seconds.values())


class Predictor:
    """Predicts choices for one job on one cluster.

    Args:
        corrections: factors from earlier predictions.
        coordinator_candidates: names of the machines that may run the coordinator; ``None``: all.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        corrections: Corrections = NO_CORRECTIONS,
        coordinator_candidates: Collection[str] | None = None,
    ) -> None:
        self.cluster = corrections.apply(average_equal_machines(cluster))
        self.coordinator = cluster.coordinator(coordinator_candidates)
        self.job = job
        self._corrections = corrections
        self._splits: dict[tuple[object, ...], BatchSplit | None] = {}
        self._exchanges = ExchangeCosts(self.cluster, job.trainable, self.coordinator, corrections, job)
        self.measured_machines = tuple(sorted(m.name for m in cluster.machines if m.trains and m.speed > 0))
        splits = [split for name in self.measured_machines if (split := self.split((name,), "")) is not None]
        fitting = [split for split in splits if split.fits] or splits
        self.alone_rate = max((job.run_steps(1).mean_batch / split.compute for split in fitting), default=0.0)
        """Samples/s of the best machine alone, among those with enough memory if there are any."""

    def predict(self, choice: Choice) -> Candidate:
        """Predict a choice.

        Raises:
            BadInput: the costs of its strategy are not known, a machine has no figures or no link, or a step has fewer
                samples than members.
        """
        if costs_of(choice.strategy) is None:
            known_strategies = ", ".join(name for name in strategies() if costs_of(name))
            raise BadInput(f"the cost of strategy '{choice.strategy}' is not known", f"known: {known_strategies}")
        unknown = [name for name in choice.members if name not in self.measured_machines]
        if unknown:
            raise BadInput(f"{unknown[0]} has no measured speed", "measure it, or leave it out")
        if not choice.alone and not self._exchanges.are_linked(choice):
            raise BadInput(f"some of {', '.join(choice.members)} have no link to each other", "measure the links")
        members = tuple(sorted(choice.members))
        split = self.split(members, "" if choice.alone else choice.strategy)
        if split is None:
            raise BadInput(f"a step has fewer samples than there are members ({len(members)})", "raise the batch size")
        return self.candidate(choice.model_copy(update={"members": members}), split)

    # ----------------------------------------------------------------------------------------------------------- parts

    def caps(self, members: Sequence[str], strategy: str) -> list[int]:
        """Return the largest micro-batch of each member that fits besides its buffers of the group's exchange."""
        owned = memory_model.exchange_bytes(strategy, self.job.trainable, self.job) if len(members) > 1 else 0

        def cap(machine: ClusterMachine) -> int:
            return memory_model.largest_batch(self.job, machine, strategy, self._in_training_memory(machine, owned))

        return [cap(self.cluster.machine(name)) for name in members]

    def split(self, members: tuple[str, ...], strategy: str) -> BatchSplit | None:
        """Return the micro-batches of a group with the least gradient accumulation that fits; ``None`` if a step has
        fewer samples than members."""
        key = (members, strategy)
        if key not in self._splits:
            caps = self.caps(members, strategy)
            costs = costs_of(strategy) if strategy else None
            is_even = costs is not None and not costs.waits  # slower members take fewer steps, not smaller batches
            split = self._fitting(members, caps, is_even, fits=True)
            self._splits[key] = split or self._fitting(members, [10**9] * len(members), is_even, fits=False)
        return self._splits[key]

    def _fitting(self, members: tuple[str, ...], caps: list[int], is_even: bool, fits: bool) -> BatchSplit | None:
        machines = {name: self.cluster.machine(name) for name in members}
        overheads, speeds = [m.overhead for m in machines.values()], [m.speed for m in machines.values()]
        batch = self.job.global_batch_of(len(members))
        exact_cuts = [k for k in divisors(self.job.reference_batch) if batch % k == 0]  # with the same result
        for accumulation in [k for k in exact_cuts if k >= self.job.accumulation] or exact_cuts[-1:]:
            split_basis = ([0.0] * len(machines), [1.0] * len(machines)) if is_even else (overheads, speeds)
            batches = cost_model.split_samples(batch // accumulation, *split_basis, caps)
            if batches is not None:
                by_member = dict(zip(members, batches, strict=True))
                seconds = mean_compute(self.job.run_steps(len(members)), by_member, accumulation, machines)
                return BatchSplit(by_member, accumulation, seconds, fits)
        return None

    # ------------------------------------------------------------------------------------------------------- intervals

    def sync_schedules(self, choice: Choice) -> Iterator[SyncSchedule]:
        """Yield the schedules (interval and delay) of a choice whose expected loss is within the job's bound."""
        costs, run = known_costs(choice, self.job), self.run_spec(choice)
        for schedule in costs.sync_schedules(run):
            is_within_bound = costs.learning(run, schedule, 1.0).loss <= self.job.max_loss_increase
            if is_within_bound and not costs.why_unsupported(run, schedule):
                yield schedule

    def refused(self, choice: Choice) -> str:
        """Return why a choice's strategy refuses all of its schedules; empty if it accepts one, or has none."""
        costs, run = known_costs(choice, self.job), self.run_spec(choice)
        refusals = [costs.why_unsupported(run, schedule) for schedule in costs.sync_schedules(run)]
        return refusals[0] if refusals and all(refusals) else ""

    def run_spec(self, choice: Choice) -> RunSpec:
        """Return the properties of the run that a strategy's cost model depends on."""
        job = self.job
        return RunSpec(job.run_steps(len(choice.members)).steps, job.start, job.lora, choice.codec, job.texts)

    # ------------------------------------------------------------------------------------------------------- candidate

    def _step(self, choice: Choice, split: BatchSplit, exchange: ExchangeForecast) -> tuple[float, float]:
        """Return the time of a step, and the part of it that the slowest member waits because step times vary."""
        if choice.alone:
            return split.compute, 0.0
        deviations = [self.cluster.machine(name).spread * seconds for name, seconds in split.seconds.items()]
        member_seconds = self._member_seconds(choice, split, exchange).values()
        steps = [busy + exposed / choice.interval for busy, exposed in member_seconds]
        if not known_costs(choice, self.job).waits:
            return statistics.harmonic_mean(steps), 0.0
        slowest = cost_model.expected_slowest(steps, deviations, choice.interval)
        return slowest, slowest - max(steps)

    def _member_seconds(
        self, choice: Choice, split: BatchSplit, exchange: ExchangeForecast
    ) -> dict[str, tuple[float, float]]:
        """Return for each member the seconds for which it is busy in a step (compute, concurrent work for exchanges,
        merge), and those of an exchange that its compute does not hide."""
        if choice.alone:
            return {name: (seconds, 0.0) for name, seconds in split.seconds.items()}
        costs, schedule, size = known_costs(choice, self.job), sync_schedule_of(choice), self.job.trainable
        member_seconds = {}
        exchange_seconds = exchange.seconds
        for name, compute in split.seconds.items():
            hidden = costs.hidden(exchange_seconds, Compute(compute, split.accumulation, size), schedule, self.job)
            hidden_share = hidden / exchange_seconds if exchange_seconds else 0.0
            merge = costs.merge_ns * 1e-9 * size / min(1.0, self.cluster.machine(name).cores or 1.0)
            concurrent = (exchange.work[name] * hidden_share + merge) / choice.interval
            member_seconds[name] = compute + concurrent, exchange_seconds - hidden
        return member_seconds

    def _learning(self, choice: Choice, split: BatchSplit) -> tuple[float, float, tuple[str, ...]]:
        """Return token efficiency, expected increase of the loss, and the sources of both."""
        job, run = self.job, self.run_spec(choice)
        if choice.alone:
            alone = known_costs(choice.model_copy(update={"strategy": default_strategy()}))
            return 1.0, 0.0, alone.learning(RunSpec(run.steps), SyncSchedule(), 1.0).sources
        ratio = job.global_batch_of(len(choice.members)) / job.global_batch_of(1)
        effective_members = sum(split.batches.values()) / max(split.batches.values())
        learning = known_costs(choice, self.job).learning(run, sync_schedule_of(choice), effective_members)
        sources = (*learning.sources, "batch") if ratio > 1 else learning.sources
        return max(0.0, batch_efficiency(ratio, job.lr_scaling) * learning.share), learning.loss, sources

    def outcome(self, choice: Choice, split: BatchSplit) -> PredictedOutcome:
        """Return the figures by which a choice is ranked, cheaply; its members are sorted, and ``split`` is theirs."""
        exchange = self._exchanges.forecast(choice)
        step, skew = self._step(choice, split, exchange)
        efficiency, loss, sources = self._learning(choice, split)
        rate = self.job.run_steps(len(choice.members)).mean_batch / step
        hourly = _hourly(choice, step)
        return PredictedOutcome(
            choice=choice,
            fits=split.fits and self._owners_fit(choice, split, exchange),
            step=step,
            skew=skew,
            samples_per_second=rate,
            speed_up=rate / self.alone_rate,
            token_efficiency=efficiency,
            useful_speed_up=rate / self.alone_rate * efficiency,
            loss_increase=loss,
            sources=sources,
            bytes_per_hour=max((size * hourly for _, size in exchange.moved), default=0.0),
        )

    def _owners_fit(self, choice: Choice, split: BatchSplit, exchange: ExchangeForecast) -> bool:
        """Whether every member has the memory for its exchange buffers besides its batch."""
        job, strategy = self.job, choice.strategy
        mesh = {owns: memory_model.mesh_bytes(strategy, job.trainable, owns, job) for owns in (True, False)}

        def fits(name: str) -> bool:
            machine, buffered = self.cluster.machine(name), exchange.buffered[name]
            owned = self._in_training_memory(machine, buffered + mesh[buffered > 0])
            return memory_model.largest_batch(job, machine, strategy, owned) >= split.batches[name]

        return choice.alone or all(map(fits, choice.members))

    @staticmethod
    def _in_training_memory(machine: ClusterMachine, size: int) -> int:
        """Return how many of ``size`` bytes of main memory are in the memory that training uses."""
        return 0 if machine.device == "cuda" else size

    def candidate(self, choice: Choice, split: BatchSplit) -> Candidate:
        """Predict a choice with a split of the samples; its members are sorted, and ``split`` is theirs."""
        job, members = self.job, len(choice.members)
        exchange = self._exchanges.forecast(choice)
        outcome = self.outcome(choice, split)
        run = job.run_steps(members)
        slowest = exchange.slowest
        numbers = {"mbit": slowest.mbit, "seconds": slowest.seconds}
        reason = Reason.of(f"slowest-{slowest.kind}", slowest.subject, slowest.peer, **numbers)
        moved = defaultdict(float, exchange.moved)
        hourly = _hourly(choice, outcome.step)
        member_seconds = self._member_seconds(choice, split, exchange)
        traffic = {name: moved[self._exchanges.machine_names[name]] * hourly for name in choice.members}
        return Candidate(
            **vars(outcome),
            members=tuple(
                self._forecast(choice, split, name, member_seconds[name][0], traffic[name], exchange.shards[name])
                for name in choice.members
            ),
            accumulation=split.accumulation,
            global_batch=job.global_batch_of(members),
            steps=run.steps,
            samples=run.samples,
            rounds=0 if choice.alone else run.steps // choice.interval,
            compute=split.compute,
            exchange=exchange.seconds,
            exchange_correction=exchange.correction,
            exposed=max(0.0, outcome.step - split.compute),
            evaluating=self._evaluating(choice, split, run.steps),
            reasons=() if choice.alone else (reason,),
        )

    def _evaluating(self, choice: Choice, split: BatchSplit, steps: int) -> float:
        """Return the seconds of all evaluations of a run; 0: unknown, for all choices alike."""
        times = {name: self.cluster.machine(name).evaluation for name in self.measured_machines}
        if not all(times.values()):
            return 0.0
        plan, seconds = self.job.evaluation, [times[name] for name in choice.members]
        together = cost_model.evaluation_seconds(plan.samples_in(steps), [*split.batches.values()], seconds)
        differ = not choice.alone and strategy_class(choice.strategy).equal == "never"
        evaluates_local_weights = plan.local == "on" or (plan.local == "auto" and differ)
        return together + (plan.samples_after_start(steps) * max(seconds) if evaluates_local_weights else 0.0)

    def unpredicted(self, choice: Choice, split: BatchSplit) -> Candidate:
        """Return a candidate without a prediction of its exchanges: with batch sizes, compute and memory only."""
        job, members = self.job, len(choice.members)
        return Candidate(
            choice=choice,
            predicted=False,
            fits=split.fits,
            members=tuple(self._forecast(choice, split, name) for name in choice.members),
            accumulation=split.accumulation,
            global_batch=job.global_batch_of(members),
            steps=job.run_steps(members).steps,
            samples=job.run_steps(members).samples,
            compute=split.compute,
        )

    def _forecast(
        self,
        choice: Choice,
        split: BatchSplit,
        name: str,
        busy: float = 0.0,
        hourly: float = 0.0,
        shard: float = 0.0,
    ) -> MemberForecast:
        """Return the forecast of a member; the last three arguments are missing without a prediction of exchanges."""
        machine, batch = self.cluster.machine(name), split.batches[name]
        return MemberForecast(
            name=name,
            micro_batch=batch,
            seconds=split.seconds[name],
            busy=busy,
            correction=self._corrections.compute.get(name, 1.0),
            memory=memory_model.member_bytes(self.job, machine, "" if choice.alone else choice.strategy, batch),
            memory_free=machine.memory_free,
            bytes_per_hour=hourly,
            shard=shard,
        )


def mean_compute(
    run: RunSteps, batches: Mapping[str, int], accumulation: int, machines: Mapping[str, ClusterMachine]
) -> dict[str, float]:
    """Return the mean seconds in which each member computes a step of a run; a smaller one is divided as the trainer
    divides it.

    Args:
        batches: micro-batches by member, in the order of ranks.
    """

    def mean(full: float, smaller: float) -> float:
        return (run.full * full + run.smaller * smaller) / run.steps

    parts = dict(zip(batches, apportion(run.remainder, [*batches.values()]), strict=True))
    seconds = {}
    for name, batch in batches.items():
        overhead = mean(accumulation, math.ceil(parts[name] / batch)) * machines[name].overhead
        seconds[name] = overhead + mean(accumulation * batch, parts[name]) / machines[name].speed
    return seconds


def known_costs(choice: Choice, settings: OptionsByOwner | None = None) -> CostModel:
    """Return the cost model of a choice's strategy, which must have one.

    Args:
        settings: holds the strategy's own options.
    """
    costs = costs_of(choice.strategy, settings)
    assert costs is not None, choice.strategy
    return costs


def _hourly(choice: Choice, step: float) -> float:
    """Return the number of exchanges per hour, with ``step`` seconds per step."""
    return 0.0 if choice.alone else 3600 / (step * choice.interval)


def sync_schedule_of(choice: Choice) -> SyncSchedule:
    """Return interval and delay of a choice's exchanges."""
    return SyncSchedule(choice.interval, choice.delay)


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a positive integer, ascending."""
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return tuple(sorted({*small, *(number // k for k in small)}))


def significant(value: float, digits: int = 3) -> float:
    """Return a number rounded to its leading digits, so that noise does not decide the order."""
    return round(value, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0.0
