"""Resumes a run on machines: those of its plan, or, where it has one member, any that have all parts of a snapshot: its
model is cut anew then.

Nothing of the run is changed before it is certain that it can go on.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distributed.agent.requests import ListSnapshots
from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts, save_hosts
from distributed.launcher import PlanOptions, plan_machines
from distributed.machine.link import MachineLink, Tell
from distributed.planning import planner
from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Figures, Planning, job_of
from distributed.planning.feedback import FIGURES
from distributed.planning.layouts.divided_plan import is_divided, plan_layout
from distributed.planning.memory.fitting import fit
from distributed.preparation.members import member_names, plan_run
from distributed.preparation.preflight import Ready, memory_budgets
from distributed.preparation.prepare import PrepareOptions, prepare, updated_hosts
from distributed.preparation.transfer import fetch_folder
from distributed.run.backlog import LeftAlone, since_supervisor
from distributed.run.returning import take_up
from distributed.run.run_machines import continuation, on_others, on_present, require_listed, rollback_warning
from profiles.errors import BadInput, MusterError, counted
from profiles.installation import program
from profiles.quantities import span_text
from profiles.schema import Profile
from training.layouts.inside.checks import INSIDE_LAYOUTS
from training.records.bounded_fields import Count, Rank, Step
from training.records.plan import RunPlan
from training.records.run_files import FolderLock
from training.records.run_folder import RunFolder
from training.run.processes import BackgroundProcess

_MOST_ATTEMPTS = 1000


class HeldPart(BaseModel):
    """A part of a snapshot, as a machine reports it."""

    model_config = ConfigDict(frozen=True)

    step: Step
    part: tuple[Count, Count]
    """Its number, from 0, and how many parts the snapshot has."""
    member: Rank = 0
    """Whose snapshot it is."""
    course: Annotated[tuple[tuple[Count, Step], ...], Field(max_length=_MOST_ATTEMPTS)]
    """Attempts that led to it, with the steps at which they began."""

    @property
    def snapshot(self) -> tuple[tuple[tuple[int, int], ...], int, int]:
        """What the parts of one snapshot have in common: its course, step and number of parts. Greater is newer."""
        return self.course[-1:], self.step, self.part[1]


HeldParts = Mapping[str, Sequence[HeldPart]]
"""The parts of a run's snapshots, by the machine that has them."""


def resume_run(
    path: Path, plan: RunPlan, prepare_options: PrepareOptions, command: Sequence[str], hosts: Hosts | None = None
) -> None:
    """Resume the run in ``path`` in the background, on the machines that hold its snapshots.

    Absent machines stay members of the run, where members may be missing: they may rejoin while it runs, or when it is
    resumed again. Other machines bring new members; a model that is divided is cut anew for them. A run whose machines
    train on, or have ended it, without its supervisor is taken up where it is instead.

    Args:
        hosts: machines to resume it on; ``None``: its own.

    Raises:
        BadInput: another process works on it, machines of its plan are not in its hosts file, the machines do not
            have all parts of any snapshot, the run takes no others, or they train until they end by themselves.
        NotReady: a machine cannot take part.
        RunFailed: the supervisor did not start.
    """
    recorded = load_hosts(path / RUN_HOSTS)
    left_out = recorded.only({m.name for m in recorded.machines} - {m.name for m in (hosts or recorded).machines})
    if hosts is None:
        require_listed(plan, [machine.name for machine in recorded.machines])
        hosts = recorded.only(plan.machines)
    elif plan.launch is not None:
        raise BadInput(f"run {plan.run_id} of a script goes on with the machines it began with", "leave --hosts out")
    _require_free(path)
    others = [prepare_options.dial(machine, left_out, None) for machine in left_out.machines]
    machines = prepare(hosts, plan.profile.model.task, prepare_options)
    try:
        left_alone = since_supervisor(RunFolder.open(path), [*(link for link, _ in machines), *others])
        if _goes_on_by_itself(path, plan, left_alone, prepare_options.tell):
            if left_alone.working and {machine.name for machine in hosts.machines} != {*plan.machines}:
                prepare_options.tell("it goes on where it was; for other machines stop it first, then resume it")
            return
        plan = _on_these(path, plan, machines, others, prepare_options.tell)
    finally:
        for link in (*(link for link, _ in machines), *others):
            link.close()
    if message := rollback_warning(RunFolder.open(path).events(), plan, plan.absent):
        prepare_options.tell(message)
    folder = RunFolder.resume(path, plan, list(command))
    for event in left_alone.events:
        folder.append(event)
    save_hosts(_merged(recorded, updated_hosts(hosts, [link for link, _ in machines])), path / RUN_HOSTS)
    folder.close()
    BackgroundProcess("distributed.supervisor").start(path)


def _require_free(path: Path) -> None:
    """Refuse a run that a process works on, before machines are asked.

    Raises:
        BadInput: one does.
    """
    lock = FolderLock(path)
    lock.acquire()
    lock.release()


def _goes_on_by_itself(path: Path, plan: RunPlan, left_alone: LeftAlone, tell: Tell) -> bool:
    """Whether another supervisor was started for the present attempt of a run, which is not over or has its model.

    Raises:
        BadInput: its workers have not ended yet, and no other supervisor can take it up.
        RunFailed: the supervisor did not start.
    """
    if not left_alone.working and not left_alone.is_completed:
        return False
    names = ", ".join(left_alone.working)
    if take_up(path):
        tell(f"{names} trained on without this computer" if names else "its machines trained to the end")
        return True
    if names:
        by_lease = (
            f"they write a snapshot and end when their lease of {span_text(plan.profile.run.lease)} is over: try again"
        )
        hint = f"stop it there, with: {program('runs', 'stop', plan.run_id)}" if plan.elects else by_lease
        raise BadInput(f"run {plan.run_id} still trains on {names}", hint)
    return False


def _on_these(
    path: Path, plan: RunPlan, machines: Sequence[Ready], left_out: Sequence[MachineLink], tell: Tell
) -> RunPlan:
    """Return the plan of an attempt on these machines.

    Args:
        left_out: machines of the run that a person has left out.
    """
    links = [link for link, _ in machines]
    if plan.world_size == 1 and {link.name for link in links} != {*plan.machines}:
        return recut(plan, machines, held_parts(links, plan.run_id), path, tell)
    there = on_others(plan, machines)
    if plan.world_size == 1 or not (left_out or there.world_size > plan.world_size):
        return there
    held = held_parts(links, plan.run_id)
    if covered_step(held) is None and not plan.is_staged:
        target = next(member for member in there.members if member.machine == links[0].name)
        held[links[0].name] += _bring_snapshot(path, plan.run_id, links[0], target.rank, left_out, tell)
    _require_covered(held, plan.run_id)
    steps = {part.step for parts in held.values() for part in parts}
    tell(continuation(RunFolder.open(path).events(), plan, there, steps))
    return there


def _bring_snapshot(
    path: Path, run_id: str, target: MachineLink, rank: int, others: Sequence[MachineLink], tell: Tell
) -> list[HeldPart]:
    """Copy the newest snapshot of a whole model from a machine that does not take part, through this computer.

    Args:
        path: run folder here.
        rank: of the member on the target, whose snapshot it is from now on.

    Returns:
        What the target has now; nothing if no machine that can be reached has one.

    Raises:
        SshError: it cannot be copied.
    """
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        found = [(part, link) for link, parts in zip(others, pool.map(lambda link: _held_by(link, run_id), others))
                 for part in parts]  # fmt: skip
    if not found:
        return []
    newest, source = max(found, key=lambda item: item[0].snapshot)
    tell(f"the snapshot of step {newest.step} comes from {source.name}")
    step = f"step-{newest.step:08d}"
    with tempfile.TemporaryDirectory(prefix=".snapshot-", dir=path) as folder:
        copy = Path(folder) / step
        fetch_folder(source, run_id, str(newest.member), f"checkpoints/member-{newest.member}/{step}", copy)
        remote = f"{target.root}/runs/{run_id}/{rank}/checkpoints/member-{rank}/{step}"
        for file in sorted(copy.iterdir(), key=lambda file: file.suffix == ".json"):  # that makes it whole
            target.connection().put(file, f"{remote}/{file.name}")
    return [newest]


def _held_by(link: MachineLink, run_id: str) -> list[HeldPart]:
    """Return what a machine has of a run's snapshots; nothing if it cannot be asked."""
    with suppress(MusterError):
        return held_parts([link], run_id)[link.name]
    return []


def _merged(recorded: Hosts, taking_part: Hosts) -> Hosts:
    """Return the machines of a run with those that take part now; the others may hold snapshots, and are cleaned."""
    present = {machine.name: machine for machine in taking_part.machines}
    earlier = tuple(present.pop(machine.name, machine) for machine in recorded.machines)
    return recorded.model_copy(update={"machines": (*earlier, *present.values())})


# -------------------------------------------------------------------------------------------- which snapshots are where


def held_parts(links: Sequence[MachineLink], run_id: str) -> dict[str, list[HeldPart]]:
    """Return the parts of a run's snapshots on each machine.

    Raises:
        SshError: a machine cannot be asked.
    """
    with ThreadPoolExecutor(max(1, len(links))) as pool:
        answers = pool.map(lambda link: link.ask(ListSnapshots(run_id)).get("snapshots"), links)
        return {link.name: list(_valid(answer)) for link, answer in zip(links, answers)}


def _valid(reported: object) -> Iterator[HeldPart]:
    """Yield the parts that a machine reports; invalid entries are skipped."""
    for entry in reported if isinstance(reported, list) else ():
        with suppress(ValidationError):
            yield HeldPart.model_validate(entry)


def covered_step(held: HeldParts) -> int | None:
    """Return the newest step of which these machines have all parts of a snapshot; ``None``: there is none."""
    numbers = defaultdict[tuple[tuple[tuple[int, int], ...], int, int], set[int]](set)
    for part in (part for parts in held.values() for part in parts):
        numbers[part.snapshot].add(part.part[0])
    whole = [snapshot for snapshot, present in numbers.items() if len(present) == snapshot[2]]
    return max(whole)[1] if whole else None


def _require_covered(held: HeldParts, run_id: str) -> None:
    """Refuse machines that do not have all parts of any snapshot.

    Raises:
        BadInput: names the parts of the newest snapshot, and who has them.
    """
    if covered_step(held) is not None:
        return
    newest = max((part.snapshot for parts in held.values() for part in parts), default=None)
    if newest is None:
        message = f"none of these machines has a part of a snapshot of run {run_id}: {', '.join(held)}"
        raise BadInput(message, "name the machines that it ran on")
    numbers = {name: {part.part[0] + 1 for part in parts if part.snapshot == newest} for name, parts in held.items()}
    present = "; ".join(f"{name}: {', '.join(map(str, sorted(parts)))}" for name, parts in numbers.items() if parts)
    message = f"no snapshot is whole on these machines: of step {newest[1]}, which has {counted(newest[2], 'part')}, "
    raise BadInput(f"{message}they have {present}", "add the machines that have the others")


# ------------------------------------------------------------------------------------------------------------- the plan


def recut(plan: RunPlan, machines: Sequence[Ready], held: HeldParts, path: Path, tell: Tell) -> RunPlan:
    """Return the plan of a run with its only member on other machines, its model cut anew by their memory and speed.

    Args:
        held: the parts of its snapshots.
        path: run folder; the figures in it are used if they have all these machines.

    Raises:
        BadInput: the machines do not have all parts of any snapshot, or the model does not fit them.
        NotReady: a machine could not run the task.
    """
    _require_covered(held, plan.run_id)
    if plan.profile.run.layout in INSIDE_LAYOUTS and {link.name for link, _ in machines} == {*plan.machines}:
        return on_present(plan, machines)  # all are back: shards lie as before
    names = member_names(machines)
    layout = "pipeline" if len(names) > 1 else "replicate"
    run = plan.profile.run.model_copy(update={"layout": layout, "stages": 0})
    profile = plan.profile.model_copy(update={"run": run})
    fixed = profile.model_copy(update={"run": run.model_copy(update={"fit_memory": "off"})})  # as it was trained so far
    if len(names) == 1:
        fit(fixed, memory_budgets(fixed, machines))
    cut = plan_machines(
        machines, fixed, PlanOptions(planning=_planning(fixed, names, path), only_member=True), tell
    ).plan
    if covered_step({name: held[name] for name in cut.machines}) is None:  # parts are on others, too
        cut = plan_run(fixed, machines)
    member = plan.members[0].model_copy(update={"devices": cut.members[0].devices})
    stages = ", ".join(device.machine for device in member.devices)
    tell(f"the model is cut anew: {stages}")
    return plan.model_copy(update={"members": (member,), "profile": profile, "coordinator": cut.coordinator})


def _planning(profile: Profile, names: Sequence[str], path: Path) -> Planning | None:
    """Return the cut by the figures of an earlier plan; ``None`` if they lack one of these devices."""
    if not is_divided(profile):
        return None
    with suppress(MusterError):
        figures = Figures.read(path / FIGURES)
        measured = {machine.name for machine in figures.cluster.machines if machine.trains}
        if measured >= set(names):
            cluster = _only(figures.cluster, names)
            planning = plan_layout(cluster, job_of(profile, figures.workload), profile, only_member=True)
            return planner.with_hashes(planning, cluster, profile)
    return None


def _only(cluster: Cluster, names: Sequence[str]) -> Cluster:
    machines = tuple(m if m.name in names else m.model_copy(update={"trains": False}) for m in cluster.machines)
    return Cluster(machines=machines, links=cluster.links, here=cluster.here)
