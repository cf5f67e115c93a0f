"""Cost models of strategies that merge weights every H steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from profiles.declarations import OptionsByOwner
from training.exchange.codecs import codec_by_name
from training.strategies.costs import (
    Compute,
    CostModel,
    Learning,
    RunSpec,
    SyncSchedule,
    interpolate,
    intervals,
    merge_efficiency,
)
from training.strategies.parts.outer_optimizers import OuterOptions

OVERLAP = 5
OVERLAPS = (0, OVERLAP, 2 * OVERLAP)
"""Steps that an exchange may overlap, offered up to a quarter of the interval; Streaming DiLoCo's figures end at 10."""

_LOSS_BY_ROUNDS: Mapping[str, Mapping[int, float]] = {
    "pretrained": {3: 0.0, 10: 0.0},
    "texts": {10: 0.066, 30: 0.038, 176: 0.0},
    "scratch": {3: 0.067, 10: 0.053, 30: 0.053, 176: 0.0},
}
"""Loss over per-step averaging, by rounds of the run. Trained: ``benchmarks/fine_tune_worth.py``, validation loss 0.081
and 0.080 against 0.097, means of three seeds. From scratch with 3 rounds, own check: 2.676 against 2.508; with more,
the interval decides too. Language models: ``benchmarks/strategies.py``, means of three seeds, of
trained ones and one standard deviation; DiLoCo's 176 rounds lost nothing (arXiv 2311.08105)."""
_LOSS_BY_INTERVAL: Mapping[str, Mapping[int, float]] = {
    "texts": {8: 0.035, 24: 0.064, 50: 0.138},
    "scratch": {1: 0.0, 25: 0.028, 50: 0.047, 100: 0.063, 200: 0.074, 500: 0.094},
}
"""From scratch: ft-diloco, TinyStories, outer rate untuned. Trained language models: ``benchmarks/strategies.py``, with
H = 8 and 24 three seeds; 50: 0.120 in 10 rounds and 0.156 in 30, one seed each."""
_GAIN_BY_ROUNDS: Mapping[str, Mapping[int, float]] = {
    "pretrained": {3: 1.0, 10: 1.0},
    "texts": {10: 0.34, 30: 0.65, 176: 1.0},
    "scratch": {3: 0.04, 10: 0.43, 30: 0.43, 176: 0.55},
}
"""Share of per-step averaging's gain over one machine (0.119 to 0.097 in the fine-tune)."""
_GAIN_BY_INTERVAL: Mapping[str, Mapping[int, float]] = {"texts": {8: 0.65, 24: 0.34, 50: 0.25}}
_LOSS_OF_OVERLAP = 0.002


class IntervalCosts(CostModel):
    """All trainable parameters merged every H steps on the host, with nothing hidden."""

    exact = False
    on_device = False
    merge_ns = (
        5.3  # DiLoCo's copies, hash and outer step of 37.7 M parameters (docs/inside/performance.md): the most of all
    )

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        return map(SyncSchedule, intervals(run))

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        return {
            self.interval_option: schedule.interval,
            "error_feedback": codec_by_name(run.codec).wants_feedback,
        }


class OuterCosts(IntervalCosts):
    """All trainable parameters exchanged every H steps, with a loss that depends on rounds and interval.

    Args:
        name: of the strategy, which has the options ``sync_interval``, ``sync_delay``, ``outer_lr`` and
            ``outer_momentum``.
        options: their values.
    """

    codecs: tuple[str, ...] = ("mxfp4", "bf16")
    vectors = 6  # anchor, momentum, delta, the weights it was computed from, mean and outer update
    sources: ClassVar[Mapping[str, str]] = {
        "diloco-pretrained": "DiLoCo in a fine-tune by rounds: own check, Whisper tiny.en, three seeds, 2 members",
        "diloco-texts": "DiLoCo in a fine-tune of a language model, by rounds and H: own check, 0.9 M, 4 members",
        "diloco-scratch": "DiLoCo from scratch by H: ft-diloco, 51 M, 2 members; by rounds: own check, 4 members",
        "overlap": "overlap of up to 10 steps: below 0.2 % (Streaming DiLoCo, arXiv 2501.18512)",
    }

    losses: ClassVar = _LOSS_BY_ROUNDS
    gains: ClassVar = _GAIN_BY_ROUNDS
    interval_losses: ClassVar = _LOSS_BY_INTERVAL
    interval_gains: ClassVar = _GAIN_BY_INTERVAL

    def __init__(self, name: str, options: OuterOptions) -> None:
        self._name, self._options = name, options
        self.interval_option = f"{name}.sync_interval"
        if options.outer_optimizer == "adamw":  # two moments
            self.vectors = self.vectors + 1

    def device_vectors(self, error_feedback: bool) -> float:
        """What the codec dropped; while an exchange overlaps with steps, also what was sent and the weights before.

        Anchor and outer state are there too, but only where twice their memory is free: no member needs them there."""
        overlaps = getattr(self._options, "sync_delay", 0) > 0
        return overlaps + error_feedback * (1 + overlaps)

    def with_options(self, settings: OptionsByOwner) -> CostModel:
        options = settings.owned.get(self._name)
        return type(self)(self._name, options) if isinstance(options, OuterOptions) else self

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        for interval in intervals(run):
            for delay in OVERLAPS:
                if 4 * delay <= interval:
                    yield SyncSchedule(interval, delay)

    def hidden(self, exchange: float, compute: Compute, schedule: SyncSchedule, settings: OptionsByOwner) -> float:
        return min(exchange, schedule.delay * compute.seconds)

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        rounds, kind = run.rounds(schedule), "texts" if run.texts and run.start != "scratch" else run.start
        gain, loss = interpolate(self.gains[kind], rounds), interpolate(self.losses[kind], rounds)
        if kind in self.interval_losses:
            loss = max(loss, interpolate(self.interval_losses[kind], schedule.interval, extended=True))
        if kind in self.interval_gains:
            gain = min(gain, interpolate(self.interval_gains[kind], schedule.interval, extended=True))
        share = merge_efficiency(effective_members, max(0.0, gain))
        overlap = ("overlap",) if schedule.delay else ()
        sources = (f"diloco-{kind}", *codec_by_name(run.codec).sources, *overlap)
        return Learning(share, max(0.0, loss) + (_LOSS_OF_OVERLAP if schedule.delay else 0.0), sources)

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        rate, momentum = self._options.outer_rates(run.steps // schedule.interval, run.start)
        return {
            self.interval_option: schedule.interval,
            f"{self._name}.sync_delay": schedule.delay,
            f"{self._name}.outer_lr": rate,
            f"{self._name}.outer_momentum": momentum,
            "error_feedback": codec_by_name(run.codec).wants_feedback,
        }


def diloco_learning(run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
    """Return how well DiLoCo with default options learns at an interval."""
    return OuterCosts("diloco", OuterOptions()).learning(run, schedule, effective_members)
