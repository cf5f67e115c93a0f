"""The scripted mishap: one machine's link is cut in the middle of a run, the others go on, and it comes back.

The log of the lost machine holds the root cause; what the hub and the others write follows from it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.demo.beats import Beat, LogLine
from app.demo.machines import ScriptedMachine
from training.events import Event, MemberEvent, WarningEvent
from training.plan import MemberPlan, RunPlan

LEASE = 5.0
"""Seconds of silence after which the hub goes on without a member."""
LOST_AT, BACK_AFTER = 0.42, 0.16
"""When the machine is lost, and how much later it is back, as shares of the run's steps."""


class OnClock(Protocol):
    """What the mishap needs of a member."""

    plan: MemberPlan
    machine: ScriptedMachine
    chance: random.Random
    clock: float
    here: bool

    @property
    def rank(self) -> int: ...


@dataclass
class Mishap:
    """Who is lost, and when."""

    rank: int
    lost_step: int
    back_step: int
    hub_address: str
    silence_ends: float = 0.0
    """Until then the others wait for it."""


def plan_mishap(members: Sequence[OnClock], plan: RunPlan, total: int) -> Mishap | None:
    """Return the mishap of a run; ``None`` where the run could not go on."""
    if len(members) < 2 or plan.engine != "hub" or total < 20:
        return None
    wireless = [member.rank for member in members[1:] if member.machine.wifi]
    lost = round(LOST_AT * total)
    rank = wireless[0] if wireless else members[-1].rank
    return Mishap(rank, lost, lost + round(BACK_AFTER * total), plan.hub_address or "the hub")


def beats_of(mishap: Mishap | None, members: Sequence[OnClock], step: int, meets: bool) -> list[Beat]:
    """Return what happens after a step, and let the machine go or come back.

    Args:
        meets: whether the members have just synchronised.
    """
    if mishap is None:
        return []
    victim = next(member for member in members if member.rank == mishap.rank)
    others = [member for member in members if member.rank != mishap.rank]
    if step == mishap.lost_step:
        return list(_lose(mishap, victim, others, step))
    if step >= mishap.back_step and meets and not victim.here:
        return list(_bring_back(victim, others, step))
    return []


def _lose(mishap: Mishap, victim: OnClock, others: Sequence[OnClock], step: int) -> Iterator[Beat]:
    name, interface, cut = victim.plan.name, victim.machine.interface, victim.clock
    gone = mishap.silence_ends = cut + LEASE
    victim.here = False
    cause = f"silent for {LEASE:g} s"
    yield _log(cut + 0.2, name, f"ERROR network: {interface}: link is down")
    yield _log(cut + 1.1, name, f"ERROR exchange: connection to the hub {mishap.hub_address} broke: No route to host")
    yield _log(cut + 2.1, name, "WARNING exchange: trying the hub again every second")
    yield _log(gone, "hub", f"WARNING {name}: {cause}; dropped")
    yield Beat(gone, _of(victim, MemberEvent(status="lost", name=name, message=cause)))
    warning = WarningEvent(message=f"{name} is lost ({cause}); the others go on", step=step)
    yield Beat(gone, _of(victim, warning))
    for other in others:
        line = f"ERROR exchange: nothing came from rank {victim.rank} ({name}); the round closes without it"
        yield _log(gone + 0.2 + 0.1 * other.rank, other.plan.name, line)


def _bring_back(victim: OnClock, others: Sequence[OnClock], step: int) -> Iterator[Beat]:
    name, now = victim.plan.name, max(other.clock for other in others)
    victim.here, victim.clock = True, now + 0.7
    yield _log(now - 1.2, name, f"INFO network: {victim.machine.interface}: link is up")
    yield _log(now - 0.8, "hub", f"INFO {name} is back and waits for the weights")
    yield Beat(now - 0.8, _of(victim, MemberEvent(status="joined", name=name, message="joins a running group")))
    yield Beat(now + 0.4, _of(victim, MemberEvent(status="ready", name=name, message="has the anchor")))
    yield Beat(now + 0.7, _of(victim, MemberEvent(status="joined", name=name, message=f"at step {step}")))


def _log(at: float, name: str, line: str) -> Beat:
    return Beat(at, LogLine(name, line))


def _of(member: OnClock, event: Event) -> Event:
    return event.model_copy(update={"member": member.rank})
