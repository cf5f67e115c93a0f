"""What the scripted machines pretend to train, and the plan of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from app.demo.beats import dice
from app.demo.machines import HUB_PORT, ScriptedMachine
from profiles.resolve import profile_from_options
from profiles.schema import Profile
from training.data import shares_to_batch_sizes
from training.plan import MemberPlan, RunPlan

PROFILE = "scripted-demo"
TRAINABLE = 3_538_944
"""Parameters of rank-32 adapters on a model of Whisper small's shape: what a scripted exchange sends."""
TOTAL = 241_734_912 + TRAINABLE
SAMPLES = 6_400
"""Training samples of one epoch."""
STEPS = 320
BATCH = 8
SEED = 42
STRATEGY_REASON = "scripted: no machine was measured and none trains"


def demo_profile() -> Profile:
    """Return the profile of the scripted job."""
    return profile_from_options(
        PROFILE,
        {
            "model_path": "openai/whisper-small",
            "dataset_path": "scripted-recordings",
            "tuning": "lora",
            "lora_rank": 32,
            "language": "en",
            "learning_rate": 5e-4,
            "warmup_steps": 40,
            "batch_size": BATCH,
            "max_steps": STEPS,
            "eval_interval": 80,
            "snapshot_interval": 80,
            "strategy": "diloco",
            "codec": "mxfp4",
            "sync_interval": 20,
        },
    )


def demo_plan(machines: Sequence[ScriptedMachine], seed: int, start: float) -> RunPlan:
    """Return the plan of a scripted run: batches by the speed of the machines, the hub on the first one."""
    profile = demo_profile()
    sizes = shares_to_batch_sizes([machine.speed for machine in machines], BATCH)
    return RunPlan(
        run_id=run_id(seed, start),
        profile=profile,
        members=tuple(
            MemberPlan(rank=rank, name=machine.name, device=machine.device, batch_size=size)
            for rank, (machine, size) in enumerate(zip(machines, sizes))
        ),
        engine="hub",
        hub_address=f"{machines[0].address}:{HUB_PORT}",
    )


def run_id(seed: int, start: float) -> str:
    """Return the id of a run that starts at ``start``: the same for the same seed."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(start))}-{dice(seed, 'run').randrange(1 << 16):04x}"
