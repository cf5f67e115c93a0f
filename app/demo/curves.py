"""The made-up courses of a scripted training: loss, word error rate, learning rate."""

from __future__ import annotations

import math
import random

from profiles.schema import TrainingSettings

_LOSS_FLOOR, _LOSS_DROP, _LOSS_PACE = 0.34, 2.6, 5.0
_WER_FLOOR, _WER_DROP, _WER_PACE = 0.112, 0.31, 3.6


def loss_at(share: float, chance: random.Random) -> float:
    """Return the training loss of one member's step after a share of the run."""
    course = _LOSS_FLOOR + _LOSS_DROP * math.exp(-_LOSS_PACE * share)
    return float(course * math.exp(chance.gauss(0.0, 0.11)))


def evaluation_at(share: float, split: str, chance: random.Random) -> dict[str, float]:
    """Return the figures of an evaluation after a share of the run; ``test`` is a little harder."""
    harder = 1.08 if split == "test" else 1.0
    wer = harder * (_WER_FLOOR + _WER_DROP * math.exp(-_WER_PACE * share)) * (1 + chance.gauss(0.0, 0.015))
    loss = harder * (_LOSS_FLOOR * 1.15 + _LOSS_DROP * math.exp(-_LOSS_PACE * share))
    return {"loss": loss, "wer": wer, "cer": wer * 0.41}


def learning_rate_at(step: int, total: int, training: TrainingSettings) -> float:
    """Return the learning rate of a step: warm-up, then linear to zero."""
    if step <= training.warmup_steps:
        return training.learning_rate * step / max(1, training.warmup_steps)
    return training.learning_rate * max(0.0, (total - step) / max(1, total - training.warmup_steps))


def gradient_norm_at(share: float, chance: random.Random) -> float:
    """Return the norm of a step's gradient."""
    return float((0.6 + 2.4 * math.exp(-4.0 * share)) * math.exp(chance.gauss(0.0, 0.2)))
