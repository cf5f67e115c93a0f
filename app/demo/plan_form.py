"""The Plan and Links screens of scripted machines: what a real set-up would do, and that this one does not."""

from __future__ import annotations

from app.demo.machines import ScriptedMachine, scripted_machine
from app.wizard.state import ChangeRow, LinkRow, Plan, Status
from distributed.planning.cluster import Link
from distributed.planning.document import Candidate
from training.plan import MemberPlan, RunPlan

CODE, DATA = 1_400_000, 84_000_000
"""Bytes that a scripted machine lacks."""
ENCRYPTED = ("training traffic: TLS with certificates of this run", "commands, code and data: SSH")
NOT_DONE = "scripted: nothing is copied, installed or trained"


def plan_of(plan: RunPlan, chosen: Candidate | None, machines: int) -> Plan:
    """Return the Plan screen of a run."""
    changes = tuple(row for member in plan.members for row in _changes(member, here=member.rank == 0))
    far = plan.world_size > 1
    return Plan(
        changes=changes,
        bytes_to_copy=sum(change.bytes for change in changes),
        ports=(f"hub on {plan.hub_address}",) if far else (),
        seconds=chosen.step * chosen.steps if chosen else None,
        way=f"{_way(chosen)} ({NOT_DONE})" if chosen else "",
        encrypted=ENCRYPTED if far else (),
        command=f"python wizard.py --demo {machines}",
        hash=plan.hash(),
        status=Status.WARNING,
        cause=NOT_DONE,
    )


def _way(chosen: Candidate) -> str:
    choice = chosen.choice
    if choice.alone:
        return f"{choice.members[0]} alone"
    interval = f" every {choice.interval} steps" if choice.interval > 1 else ""
    return f"{choice.strategy} {choice.codec}{interval} over the {choice.engine} on {choice.hub}"


def _changes(member: MemberPlan, here: bool) -> list[ChangeRow]:
    machine = scripted_machine(member.name)
    rows = [_row(machine, "run", "~" if here else "+", f"{member.batch_size} samples a step on {member.device}", 0)]
    if here:
        return [*rows, _row(machine, "output", "+", "the run's folder in output/", 0)]
    return [
        *rows,
        _row(machine, "code", "+", "code of this version", CODE),
        _row(machine, "data", "+", "recordings that it lacks", DATA),
    ]


def _row(machine: ScriptedMachine, key: str, sign: str, what: str, size: int) -> ChangeRow:
    return ChangeRow(
        f"{machine.name}/{key}", machine.name, Status.OK, sign=sign, machine=machine.name, what=what, bytes=size
    )


def link_row(link: Link, one: ScriptedMachine, other: ScriptedMachine) -> LinkRow:
    """Return a link as the matrix shows it, with what a person should know of it."""
    warnings = tuple(_warnings(link, one, other))
    return LinkRow(
        key=f"{one.name}|{other.name}",
        name=f"{one.name} - {other.name}",
        status=Status.WARNING if warnings else Status.OK,
        fix="a cable would help most" if link.medium == "wifi" else "",
        source=one.name,
        target=other.name,
        mbit=link.mbit,
        mbit_back=link.mbit_back,
        rtt_ms=link.rtt_ms,
        path=f"{one.interface} to {other.address}: the fastest that was measured",
        warnings=warnings,
    )


def _warnings(link: Link, one: ScriptedMachine, other: ScriptedMachine) -> list[str]:
    found = []
    if link.medium == "wifi":
        found.append(f"Wi-Fi: {' and '.join(machine.name for machine in (one, other) if machine.wifi)}")
    slow, fast = sorted((link.mbit, link.mbit_back))
    if fast > 1.25 * slow:
        found.append(f"asymmetric: {fast:.0f} Mbit/s one way, {slow:.0f} the other")
    return found
