"""A look at what a job finds on machines that are ready: its memory, its data, the port of its hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from distributed.checks.findings import Finding, Health
from distributed.checks.job_findings import judge_data, judge_memory, judge_origin, judge_port
from distributed.machine.link import Link, document
from distributed.measuring.machine_figures import SpeedFigures, seats_of
from distributed.measuring.measure import known_speeds
from distributed.planning.measurement_cache import MeasurementCache
from distributed.planning.model_size import ModelSize, size_for
from distributed.preparation.code_sync import Inputs, collect
from distributed.preparation.members import plan_run
from distributed.preparation.preflight import Facts
from distributed.preparation.transfer import Lack
from profiles.errors import MusterError
from profiles.schema import Profile
from training.tasks.published_models import with_local_model


@dataclass
class JobLook:
    """What was seen of a job."""

    profile: Profile
    size: ModelSize | None = None
    measured: dict[str, SpeedFigures] = field(default_factory=dict)
    """The task on a machine that was measured before, by the machine's name."""
    everywhere: list[Finding] = field(default_factory=list)
    """What is true of every machine."""
    here: list[Finding] = field(default_factory=list)
    """Of the machine that starts the run."""
    data: dict[str, list[Finding]] = field(default_factory=dict)
    """By machine."""

    def of(self, name: str, health: Health | None) -> list[Finding]:
        """Return the findings of one machine."""
        memory = [judge_memory(self.profile, self.size, self.measured.get(name), health)] if health else []
        return [*memory, *self.data.get(name, []), *self.everywhere]


def look_at_job(
    profile: Profile, machines: Sequence[tuple[Link, Facts]], cache: MeasurementCache | None = None
) -> JobLook:
    """Compare a job with machines that are connected; nothing is written on them.

    What is wrong with the job itself is a finding of every machine.
    """
    found = JobLook(
        profile, here=judge_port(profile.strategy.hub_port), everywhere=judge_origin(with_local_model(profile))
    )
    found.size = size_for(profile)
    if not machines:
        return found
    try:
        plan = plan_run(profile, machines)
        inputs = collect(plan)
    except MusterError as error:
        found.everywhere.append(Finding("data", "problem", error.message, "a job that can be read", error.hint))
        return found
    seats = seats_of(list(machines), plan.members)
    for seat, figures in zip(seats, known_speeds(seats, inputs, cache or MeasurementCache()), strict=True):
        if figures is not None:
            found.measured[seat.link.name] = figures
    with ThreadPoolExecutor(len(machines)) as pool:
        answers = pool.map(lambda one: _data(inputs, *one), machines)
        found.data = dict(zip((link.name for link, _ in machines), answers, strict=True))
    return found


def _data(inputs: Inputs, link: Link, facts: Facts) -> list[Finding]:
    try:
        return judge_data(inputs.trees, missing_there(link, inputs), facts)
    except MusterError as error:
        return [Finding("data", "warning", f"its data could not be checked: {error.message}")]


def missing_there(link: Link, inputs: Inputs) -> Lack:
    """Ask what a run would send, by a program that travels in the command.

    Raises:
        SshError: it cannot be asked, or answers with something else.
    """
    blobs = sorted({blob for tree in inputs.trees.values() for blob in tree.sources})
    question = json.dumps({"trees": [tree.name for tree in inputs.trees.values()], "blobs": blobs})
    answer = link.ask_unprepared("missing", input=question.encode())
    return Lack.parse(link.name, document(link.name, answer.stdout), blobs)
