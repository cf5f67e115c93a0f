"""The learning rate: its course over the steps, and how it follows the global batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from training.strategies.costs import start_of

if TYPE_CHECKING:
    from profiles.schema import Profile

Schedule = Literal["constant", "linear", "cosine"]
ScalingRule = Literal["off", "sqrt", "linear"]


def learning_rate_at(step: int, total_steps: int, warmup_steps: int, schedule: Schedule, peak: float) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0).

    Linear warm-up ``peak * (step + 1) / warmup_steps``, so the first step is never a step of length zero; then with
    ``t = (step - warmup_steps) / (total_steps - warmup_steps)``: ``constant`` peak, ``linear`` ``peak * (1 - t)``,
    ``cosine`` ``peak * (1 + cos(pi t)) / 2`` (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5 without restarts).
    From ``total_steps`` on, ``linear`` and ``cosine`` stay 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    t = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - t)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * t))
    return peak


def ends_in_warm_up(steps: int, profile: Profile) -> str:
    """Return what a person is told of a run whose learning rate never reaches its peak; empty: it does.

    More steps make a fine-tune of few recordings better, but for wrong transcripts, which are learnt by heart then
    (docs/whisper.md, "Few recordings").
    """
    warmup_steps = profile.training.warmup_steps
    if not 0 < steps < warmup_steps:
        return ""
    said = f"all of its {steps} steps are in the warm-up of {warmup_steps}"
    reached = f"the learning rate reaches {steps / warmup_steps:.0%} of its peak"
    if start_of(profile) == "pretrained" and not profile.model.teacher_path:
        return f"{said}: {reached}; once wrong transcripts are corrected, raise epochs"
    return f"{said}: {reached}; raise epochs, or lower warmup_steps"


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
