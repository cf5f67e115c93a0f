"""What a scripted machine tells of its load: no more than a real one of its kind tells an ordinary user."""

from __future__ import annotations

import math
import random

from app.demo.machines import ScriptedMachine
from training.events import MachineEvent

_WARM_UP = 40.0
"""Seconds after which a machine that works has come two thirds of the way to its final temperature."""
_COLD, _HOT = 41.0, 74.0


def load_event(machine: ScriptedMachine, chance: random.Random, clock: float, start: float) -> MachineEvent:
    """Return what a machine says at a time of a script whose training began at ``start``."""
    busy = machine.cores * 92.0 if machine.device == "cpu" else 135.0
    held = machine.device_memory or machine.memory
    worked = max(0.0, clock - start)
    heat = 1 - math.exp(-worked / _WARM_UP)
    tells_heat, tells_power = machine.system == "linux", machine.device == "cuda"
    watts = machine.speed * 4.1
    return MachineEvent(
        cpu_percent=round(busy * chance.uniform(0.9, 1.05), 1),
        memory_used=round(2.3e9 * chance.uniform(0.97, 1.03)),
        memory_total=machine.memory,
        device_memory_used=None if machine.device == "cpu" else round(held * 0.42 * chance.uniform(0.97, 1.03)),
        celsius=round(_COLD + (_HOT - _COLD) * heat, 1) if tells_heat else None,
        throttled=False if tells_power else None,
        watts=round(watts * (0.9 + 0.1 * heat), 1) if tells_power else None,
        joules=round(_joules(watts, worked), 1) if tells_power else None,
        meters=("gpu",) if tells_power else None,
        battery_percent=None if machine.on_mains else max(5.0, round(64 - worked / 90, 1)),
        on_mains=None if machine.on_mains else False,
    )


def _joules(watts: float, worked: float) -> float:
    """Return the integral of the power since the training began."""
    warming = worked - _WARM_UP * (1 - math.exp(-worked / _WARM_UP))
    return watts * (0.9 * worked + 0.1 * warming)
