"""The script of a start: connections, code and data, imports, features, until all members are ready."""

from __future__ import annotations

from collections.abc import Iterator

from app.demo.beats import Beat, LogLine, dice
from app.demo.machines import scripted_machine
from training.events import Event, MemberEvent, ProgressEvent, RunEvent, TimingEvent
from training.plan import MemberPlan, RunPlan

SCRIPTED = "scripted: no machine trains, all figures are made up"
_CLIPS = 480
"""Recordings whose features are counted while they are made."""
_COUNTS = 12
CONNECTED = 1.2


def opening(plan: RunPlan, seed: int) -> list[Beat]:
    """Return the beats until the last member is ready."""
    details = {"workers": plan.world_size, "plan": plan.hash()}
    beats = [
        Beat(0.0, TimingEvent(part="command: program", seconds=0.5, cpu=0.4)),
        Beat(0.0, TimingEvent(part="machines: checked", seconds=1.7, cpu=0.2)),
        Beat(0.02, RunEvent(status="starting", message=SCRIPTED, details=details)),
        Beat(0.1, TimingEvent(part="engine", seconds=0.1, cpu=0.1)),
        Beat(0.1, LogLine("hub", f"INFO listening on {plan.hub_address or 'a free port'}, {plan.world_size} seats")),
    ]
    ready = 0.0
    for done, member in enumerate(plan.members, 1):
        own = list(_member(plan, member, seed))
        beats += own
        at = CONNECTED + 0.25 * done
        beats.append(Beat(at, ProgressEvent(phase="machines", done=done, total=plan.world_size)))
        ready = max(ready, own[-1].at)
    return [*beats, *_all_ready(plan, ready)]


def _member(plan: RunPlan, member: MemberPlan, seed: int) -> Iterator[Beat]:
    machine, chance = scripted_machine(member.name), dice(seed, "start", member.rank)
    at = CONNECTED + 0.2 * member.rank
    for part, seconds in (("machine: connected", 0.3), ("machine: code and data", 0.6)):
        at += seconds
        yield Beat(at, TimingEvent(part=part, seconds=seconds, cpu=0.05))
    imports = chance.uniform(1.4, 2.4) * (1.6 if machine.device == "cpu" else 1.0)
    at += imports
    yield Beat(at, _by(member, TimingEvent(part="worker: imports", seconds=imports, cpu=imports * 0.9)))
    yield Beat(at, _by(member, MemberEvent(status="started", name=member.name, message=f"pid {4000 + member.rank}")))
    yield Beat(at, LogLine(member.name, f"INFO torch on {member.device}: {machine.chip}, {machine.cores} cores"))
    data = 3.2 / machine.cores * chance.uniform(5.0, 7.0)
    for count in range(_COUNTS + 1):
        done = _CLIPS * count // _COUNTS
        progress = ProgressEvent(phase="features (train)", done=done, total=_CLIPS)
        yield Beat(at + data * count / _COUNTS, _by(member, progress))
    at += data
    if member.rank == plan.world_size - 1:
        yield Beat(at, LogLine(member.name, "WARNING clips/0412.wav: not a sound file; skipped (1 of 480)"))
    yield Beat(at, _by(member, TimingEvent(part="worker: data", seconds=data, cpu=data * 3)))
    yield Beat(at + 0.1, _by(member, MemberEvent(status="joined", name=member.name)))
    yield Beat(at + 0.1, LogLine("hub", f"INFO {member.name} joined"))


def _all_ready(plan: RunPlan, at: float) -> Iterator[Beat]:
    for member in plan.members:
        built = at + 0.4 + 0.05 * member.rank
        timing = TimingEvent(part="worker: joins, builds the model", seconds=built - at, cpu=0.3)
        yield Beat(built, _by(member, timing))
        yield Beat(built, _by(member, MemberEvent(status="ready", name=member.name, device=member.device)))


def _by(member: MemberPlan, event: Event) -> Event:
    return event.model_copy(update={"member": member.rank})
