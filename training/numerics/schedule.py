"""The learning rate: its schedule over the steps, and its scaling with the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from profiles.errors import counted
from profiles.quantities import share_text, three_digits

if TYPE_CHECKING:
    from profiles.optimisation import TrainingSettings
    from profiles.schema import Profile

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
ScalingRule = Literal["off", "sqrt", "linear"]
AskedRule = Literal["auto", "off", "sqrt", "linear"]
RATE_SHARE = "rate_share"
"""In a group of weights of a user's own optimizer: its learning rate over that of the run."""
_ROUNDING = 1e-9
_FEW = ((600, 10), (1200, 3))
"""Samples that a run is to see, each with the most passes over a data set for that: more gain nothing
(docs/how-to/whisper.md, "Few recordings")."""


IN_EACH_QUARTER = ("eval_interval", "0.25")
"""How a run over few samples evaluates: it is short, and learns by heart if it is too long."""


def learning_rate_at(
    step: int, total_steps: int, warmup_steps: int, schedule: Schedule, peak: float, decay: float = 0.2
) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0).

    Linear warm-up ``peak * (step + 1) / warmup_steps``, so the first step is never a step of length zero; then with
    ``t = (step - warmup_steps) / (total_steps - warmup_steps)``: ``constant`` peak, ``linear`` ``peak * (1 - t)``,
    ``cosine`` ``peak * (1 + cos(pi t)) / 2`` (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5 without restarts).
    ``inverse_sqrt`` ``peak * sqrt(warmup_steps / (step + 1))``, which needs no end (Vaswani et al. 2017,
    arXiv 1706.03762, section 5.3). ``wsd`` stays at the peak and falls over the last ``decay`` of all steps as
    ``peak * (1 - sqrt(share of the fall))`` (Hu et al. 2024, arXiv 2404.06395; this shape: Haegele et al. 2024,
    arXiv 2405.18392, section 3.1). From ``total_steps`` on, ``linear``, ``cosine`` and ``wsd`` stay 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup_steps) / (step + 1))
    if schedule == "wsd":
        fall = max(1.0, min(decay * total_steps, total_steps - warmup_steps))
        return peak * (1.0 - math.sqrt(min(1.0, max(0.0, (step - (total_steps - fall)) / fall))))
    t = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - t)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * t))
    return peak


def warm_up_of(training: TrainingSettings, total_steps: int) -> int:
    """Return the steps of the warm-up."""
    steps = training.warmup_steps
    return round(steps * total_steps if steps < 1 else steps)


def steps_in(steps_per_epoch: float, epochs: float, drop_last: bool = False) -> int:
    """Return the optimizer steps of a run: full epochs, then the part of the last one; at least 1.

    An epoch ends with a smaller step of the remaining samples, unless such steps are dropped.

    Args:
        steps_per_epoch: samples of an epoch over those of one step of the whole group.
    """
    full_epochs = math.floor(epochs)
    full = math.floor(steps_per_epoch + _ROUNDING) if drop_last else math.ceil(steps_per_epoch - _ROUNDING)
    partial_steps = math.ceil((epochs - full_epochs) * (full if drop_last else steps_per_epoch) - _ROUNDING)
    return max(1, full_epochs * full + partial_steps)


class RunSteps(NamedTuple):
    """The optimizer steps of a run as the trainer takes them: those of the whole group's batch, and the smaller ones at
    the ends of epochs."""

    full: int
    batch: int
    """Samples of a full step."""
    smaller: int = 0
    remainder: int = 0
    """Samples of a smaller step: what an epoch leaves for it."""

    @property
    def steps(self) -> int:
        return self.full + self.smaller

    @property
    def samples(self) -> int:
        """Samples of the whole run, each as often as it is trained on."""
        return self.full * self.batch + self.smaller * self.remainder

    @property
    def mean_batch(self) -> float:
        """Mean samples of a step."""
        return self.samples / self.steps


def run_steps(epoch_samples: int, batch: int, epochs: float, drop_last: bool = False, steps: int = 0) -> RunSteps:
    """Return the steps of a run of ``epochs`` passes, or of so many ``steps``, over a data set of ``epoch_samples``.

    Args:
        batch: samples of a step of the whole group.
        steps: a fixed number of steps; 0: as many as the epochs need.
    """
    total = steps or steps_in(epoch_samples / batch, epochs, drop_last)
    full_in_epoch, remainder = divmod(epoch_samples, batch)
    smaller = total // (full_in_epoch + 1) if remainder and not drop_last else 0
    return RunSteps(total - smaller, batch, smaller, remainder if smaller else 0)


def ends_in_warm_up(steps: int, profile: Profile) -> str:
    """Return a remark on a run whose learning rate never reaches its peak; empty where it does."""
    warmup_steps = warm_up_of(profile.training, steps)
    if not 0 < steps < warmup_steps:
        return ""
    its = "its only step is" if steps == 1 else f"all of its {steps} steps are"
    extent = f"{its} in the warm-up of {warmup_steps}"
    reached = f"the learning rate reaches {share_text(steps / warmup_steps)} of its peak"
    return f"{extent}: {reached}; set warmup_steps to 0.1, a tenth of the run, or raise epochs"


def enough_epochs(samples: int, training: TrainingSettings) -> float:
    """Return the passes that a run takes over a data set for which its profile was not made: more than the profile's
    where those would see too few samples. A profile that passes over its data three times or more says how often its
    recordings are heard, whatever their number, and stays.

    Args:
        samples: training samples of the data set; 0: not known.
    """
    needed = max(fewest for fewest, _ in _FEW)
    is_for_few = training.epochs >= min(most for _, most in _FEW)
    if training.max_steps or not samples or is_for_few or samples * training.epochs >= needed:
        return training.epochs
    return max(training.epochs, *(min(most, math.ceil(fewest / samples)) for fewest, most in _FEW))


def is_length_open(options: Mapping[str, str]) -> bool:
    """Whether these options choose another data set for a profile, but not how long it trains."""
    return bool({"dataset", "dataset_path"} & options.keys()) and not {"epochs", "max_steps"} & options.keys()


def few_samples_remark(samples: int, profile_epochs: float, epochs: str) -> str:
    """Return the remark on a run that takes more passes than its profile says."""
    return (
        f"epochs = {epochs}, as {counted(samples, 'sample')} {'are' if samples > 1 else 'is'} few: "
        f"the profile's {three_digits(profile_epochs)} would hardly train"
    )


def scaling_rule(asked: AskedRule, raised: bool) -> ScalingRule:
    """Return the rule that was asked for; ``auto`` is sqrt where a strategy says that the rate is to be raised."""
    if asked != "auto":
        return asked
    return "sqrt" if raised else "off"


def scaled_learning_rate(peak: float, rule: ScalingRule, global_batch: int, reference_batch: int) -> float:
    """Return the peak learning rate for ``global_batch`` when ``peak`` was chosen for ``reference_batch``.

    With ``k = global_batch / reference_batch``:

    * ``off``: ``peak``.
    * ``linear``: ``k * peak``. The linear scaling rule for SGD (Goyal et al. 2017, arXiv 1706.02677, section 2.1).
    * ``sqrt``: ``sqrt(k) * peak``. The square-root rule for Adam and RMSprop (Malladi et al. 2022,
      arXiv 2205.10287, definition 5.2; that rule also moves beta and epsilon, which stay as they are here).
    """
    ratio = global_batch / reference_batch
    if rule == "linear":
        return peak * ratio
    if rule == "sqrt":
        return peak * math.sqrt(ratio)
    return peak


def peak_rate(settings: TrainingSettings, global_batch: int, raised: bool) -> float:
    """Return the peak learning rate of a run whose steps have ``global_batch`` samples.

    Args:
        raised: whether the strategy says that the rate is to be raised with the batch.
    """
    rule = scaling_rule(settings.lr_scaling, raised)
    reference_batch = settings.batch_size * settings.gradient_accumulation
    return scaled_learning_rate(settings.learning_rate, rule, global_batch, reference_batch)
