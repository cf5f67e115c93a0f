"""What the scripted machines pretend to train."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from app.demo.beats import dice
from profiles.resolve import profile_from_options
from profiles.schema import Profile

PROFILE = "scripted-demo"
TRAINABLE = 3_538_944
"""Parameters of rank-32 adapters on a model of Whisper small's shape: what a scripted exchange sends."""
TOTAL = 241_734_912 + TRAINABLE
SAMPLES = 6_400
"""Training samples of one epoch."""
STRATEGY_REASON = "scripted figures"
OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        "model_path": "openai/whisper-small",
        "dataset_path": "scripted-recordings",
        "tuning": "lora",
        "lora_rank": 32,
        "language": "en",
        "learning_rate": 5e-4,
        "warmup_steps": 40,
        "batch_size": 8,
        "epochs": 1.2,
        "eval_interval": 40,
        "snapshot_interval": 80,
        "strategy": "auto",
        "engine": "hub",
    }
)


def demo_profile(changes: Mapping[str, object] = MappingProxyType({})) -> Profile:
    """Return the profile of the scripted job, with the options that a person changed.

    Raises:
        BadInput: an unknown option or a value that does not fit.
    """
    return profile_from_options(PROFILE, {**OPTIONS, **changes})


def run_id(seed: int, start: float) -> str:
    """Return the id of a run that starts at ``start``: the same for the same seed."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(start))}-{dice(seed, 'run').randrange(1 << 16):04x}"
