"""``measure`` and ``plan``: speeds of machines and links, and the best training plan for them."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.arguments import AllowMissing, HostsOfProfile, Json, ProfileName, Setting, TrustCode, TrustNew
from app.cli.terminal import answer, somebody
from app.console import say, say_error, visible
from profiles.errors import ExitCode
from profiles.installation import USUAL_HOSTS
from profiles.quantities import (
    latency_figure,
    memory_text,
    rate_figure,
    rate_text,
    share_text,
    three_digits,
    throughput_figure,
)
from training.records.events import BUSY

if TYPE_CHECKING:
    from distributed.hosts.schema import Hosts
    from distributed.launcher import PlanOptions
    from distributed.measuring.link_figures import PairFigures
    from distributed.measuring.measure import MeasurementResult
    from distributed.planning.documents.cluster import Cluster
    from distributed.planning.documents.document import Planning, Reason
    from distributed.preparation.prepare import PrepareOptions
    from profiles.schema import Profile

WIDTH = 80
"""Preferred maximum width of tables."""


def measure(
    profile: ProfileName,
    hosts: HostsOfProfile = None,
    links: Annotated[bool, typer.Option("--links", help="Measure the links only.")] = False,
    machines: Annotated[bool, typer.Option("--machines", help="Measure the machines only.")] = False,
    settings: Setting = [],  # noqa: B006 - typer copies it
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures for 'machines plan --figures'.")
    ] = None,
    max_age: Annotated[
        float, typer.Option(metavar="HOURS", min=0, help="Reuse earlier figures up to this age.")
    ] = 24.0,
    trust_new: TrustNew = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> ExitCode:
    """Measure machines with a short run of the task, and the links between them with raw TCP."""
    from app.cli.approval import approve_profile
    from app.cli.machines.access import trust
    from app.cli.train.command import merged_overrides
    from app.cli.train.start import name_misspelt_variables
    from distributed.measuring.measure import MeasureOptions
    from distributed.measuring.measure import measure as measure_all
    from training.tasks.published_models import usable_profile

    name_misspelt_variables()
    resolved = usable_profile(profile, merged_overrides(settings), tell=say)
    approve_profile(resolved, trusted=trust_code, person=somebody(as_json))
    chosen = resolved.profile
    measures_all = links == machines
    measure_options = MeasureOptions(links or measures_all, machines or measures_all, max_age * 3600, tell=say)
    result = measure_all(machines_of(hosts, chosen, somebody(as_json)), chosen, measure_options, trust(trust_new))
    if out is not None:
        result.figures.write(out)
    lines = (*matrix_lines(result), *speed_lines(result), *remark_lines(result))
    code = answer(as_json, _document(result), lines, ExitCode.NOT_READY if result.problems else ExitCode.DONE)
    for problem in () if as_json else result.problems:
        say_error(problem.message, problem.hint)
    if out is not None:
        say(f"written to {out}")
    return code


def machines_of(file: Path | None, profile: Profile, person: bool) -> Hosts:
    """Return the machines of a hosts file: the given one, the profile's, or the default one; else this machine.

    Args:
        person: whether somebody can be asked.

    Raises:
        BadInput: the file cannot be read or used.
    """
    from app.cli.approval import read_hosts
    from distributed.machine.link import this_machine

    chosen = file or (Path(profile.run.hosts) if profile.run.hosts else USUAL_HOSTS)
    if chosen is USUAL_HOSTS and not chosen.is_file():
        return this_machine()
    return read_hosts(chosen, named=file is not None, person=person)


def _document(result: MeasurementResult) -> dict[str, Any]:
    return {
        "links": [pair.model_dump(mode="json") | {"busy": pair.busy} for pair in result.pairs],
        "interfaces": [interface.model_dump(mode="json") for interface in result.interfaces.figures],
        "machines": [speed.machine.model_dump(mode="json") for speed in result.speeds],
        "workload": result.speeds[0].workload.model_dump(mode="json") if result.speeds else None,
        "problems": [{"message": problem.message, "hint": problem.hint} for problem in result.problems],
    }


def matrix_lines(result: MeasurementResult) -> list[str]:
    """Return a table of Mbit/s and milliseconds for every pair: rows send, columns receive.

    If names make it too wide, they are replaced by numbers.
    """
    if not result.pairs:
        return []
    cells: dict[tuple[str, str], str] = {}
    """Cell text by sender (row) and receiver (column)."""
    for pair in result.pairs:
        link, mark = pair.link, "*" if pair.busy else ""
        for source, target, mbit in ((pair.source, pair.target, link.mbit), (pair.target, pair.source, link.mbit_back)):
            cells[source, target] = (
                f"{rate_figure(mbit)}{mark} / {latency_figure(link.rtt_ms)}" if pair.figures else "-"
            )
    names = list(dict.fromkeys([*result.names, *(end for ends in cells for end in ends)]))

    def table(labels: list[str]) -> list[str]:
        rows = [[label, *(cells.get((name, target), "") for target in names)] for label, name in zip(labels, names)]
        return aligned([["Mbit/s / ms", *labels], *rows])

    lines = table([visible(name) for name in names])
    if max(map(len, lines)) <= WIDTH:
        return lines
    numbered = aligned([[str(number), visible(name)] for number, name in enumerate(names, 1)], ("<", "<"))
    return [*numbered, "", *table([str(number) for number in range(1, len(names) + 1)])]


def speed_lines(result: MeasurementResult) -> list[str]:
    """Return a row per machine: speed at each batch size, peak memory; two rows if a long name makes it too wide."""
    if not result.speeds:
        return []
    rows = [["machine", "device", "batch", "samples/s", "peak memory", "cores"]]
    for machine in (speed.machine for speed in result.speeds):
        measured = machine.measurements
        batches = ", ".join(str(point.batch) for point in measured)
        speeds = ", ".join(throughput_figure(point.batch / point.seconds) for point in measured)
        peak = memory_text(max(point.peak for point in measured))
        rows.append([visible(machine.name), machine.device, batches, speeds, peak, three_digits(machine.cores)])
    lines = aligned(rows)
    if max(map(len, lines)) > WIDTH:
        figures = aligned([["", *row[1:]] for row in rows])
        lines = [line for row, rest in zip(rows, figures) for line in (row[0], rest)]
    return [*([""] if result.pairs else []), *lines]


def aligned(rows: list[list[str]], sides: Sequence[str] = "<") -> list[str]:
    """Return rows as lines with aligned columns.

    Args:
        sides: ``<`` for left-aligned columns; the remaining ones are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shapes = [f"{side}{width}" for side, width in itertools.zip_longest(sides, widths, fillvalue=">")]
    return ["  ".join(format(cell, shape) for cell, shape in zip(row, shapes)).rstrip() for row in rows]


def remark_lines(result: MeasurementResult) -> list[str]:
    """Return remarks: busy or dead links, links with several paths, shared interfaces, machines that were in use."""
    remarks: list[str] = []
    for pair in result.pairs:
        ends = f"{visible(pair.source)} - {visible(pair.target)}"
        if pair.problem:
            remarks.append(f"{ends}: no data gets through ({visible(pair.problem)})")
        if pair.busy and pair.figures is not None:
            remarks.append(
                f"* {ends}: other traffic took {rate_text(pair.figures.other_mbit)}; measure again when idle"
            )
        if pair.figures is not None and pair.figures.loses_large:
            remarks.append(f"{ends}: small packets pass, large ones are lost; give both ends the same MTU")
        remarks += _way_lines(ends, pair)
    for interface in result.interfaces.figures:
        sent = f"sends {rate_text(interface.mbit)} to {interface.peers} machines at once"
        remarks.append(f"{visible(interface.machine)}: {sent}, receives {rate_text(interface.mbit_back)} from them")
    for speed in result.speeds:
        if speed.machine.others >= BUSY:
            share = f"other programs used {share_text(speed.machine.others)} of its processors during the measurement"
            remarks.append(f"{visible(speed.machine.name)}: {share}; measure again with --max-age 0 when it is idle")
    wrapped = [line for text in remarks for line in textwrap.wrap(text, WIDTH, subsequent_indent="    ")]
    return ["", *wrapped] if remarks else []


def _way_lines(ends: str, pair: PairFigures) -> list[str]:
    """Return the measured paths between two machines, the fastest first: runs use that."""
    figures = pair.figures
    if figures is None or len(figures.paths) < 2:
        return []
    lines = [f"{ends}: {len(figures.paths)} paths; runs use the fastest, listed first"]
    for address, near, far, mbit in sorted(figures.paths, key=lambda path: path[0] != figures.address):
        lines.append(f"  {visible(near) or '?'} to {visible(far) or '?'}, {visible(address)}: {rate_text(mbit)}")
    return lines


def plan(
    profile: ProfileName,
    hosts: HostsOfProfile = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plan from figures of 'machines measure --out', without contacting any machine."
        ),
    ] = None,
    preference: Annotated[
        Literal["fastest", "closest-to-exact", "least-traffic"], typer.Option(help="What to prefer.")
    ] = "fastest",
    lost_quality: Annotated[
        float, typer.Option(metavar="PERCENT", min=0, max=100, help="Largest accepted rise of the final loss.")
    ] = 2.0,
    settings: Setting = [],  # noqa: B006 - typer copies it
    explain: Annotated[bool, typer.Option("--explain", help="Show the ranking and all reasons.")] = False,
    allow_missing: AllowMissing = False,
    trust_new: TrustNew = False,
    trust_code: TrustCode = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan to this file.")] = None,
    as_json: Json = False,
) -> ExitCode:
    """Predict all candidate plans for a profile on these machines, and show the best one and why."""
    from app.cli.approval import approve_profile
    from app.cli.machines.access import prepare_options
    from app.cli.train.command import merged_overrides
    from app.plan_table import explanation_lines, summary_lines, table_lines
    from distributed.launcher import PlanOptions
    from distributed.planning.reasons import sentence
    from training.tasks.published_models import usable_profile
    from training.workers.data_findings import usable_for_data

    usable = usable_for_data if figures is None else usable_profile  # figures tell of data that may be elsewhere
    resolved = usable(profile, merged_overrides(settings), tell=say)
    plan_options = PlanOptions(preference, lost_quality / 100)
    if figures is not None:
        planning = _from_figures(figures, resolved.profile, hosts, plan_options)
    else:
        approve_profile(resolved, trusted=trust_code, person=somebody(as_json))
        machines = machines_of(hosts, resolved.profile, somebody(as_json))
        prepare = prepare_options(somebody(), trust_new, allow_missing)
        planning = _from_machines(resolved.profile, machines, plan_options, prepare)
    if out is not None:
        planning.write(out)
    document = planning.model_dump(mode="json") | {"sentences": [sentence(reason) for reason in planning.reasons]}
    table = [*table_lines(planning), "", *explanation_lines(planning)] if explain else summary_lines(planning, profile)
    code = answer(as_json, document, table, ExitCode.NOT_READY if planning.chosen is None else ExitCode.DONE)
    if out is not None and not as_json:
        say(f"written to {out}")
    return code


def _from_figures(figures: Path, profile: Profile, hosts: Path | None, plan_options: PlanOptions) -> Planning:
    from distributed.planning.cables import cable_reasons
    from distributed.planning.documents.document import Figures, job_of
    from distributed.planning.layouts.divided_plan import fit_or_divide, is_divided, plan_layout
    from distributed.planning.memory.fitting import MemoryBudget
    from distributed.planning.planner import plan as make_plan
    from distributed.planning.planner import with_hashes

    recorded = Figures.read(figures)
    members = [machine for machine in recorded.cluster.machines if machine.trains]
    budgets = [
        MemoryBudget(machine.name, machine.memory_total, machine.device, bf16=machine.bf16) for machine in members
    ]
    profile = fit_or_divide(profile, budgets, say)
    job = job_of(profile, recorded.workload, plan_options.preference, plan_options.max_loss_increase)
    cluster, missing = _subset(recorded.cluster, hosts) if hosts is not None else (recorded.cluster, ())
    if is_divided(profile):
        planning = with_hashes(plan_layout(cluster, job, profile), cluster, profile)
        return planning.model_copy(update={"reasons": (*planning.reasons, *missing)})
    planning = with_hashes(make_plan(cluster, job), cluster, profile)
    cables = cable_reasons(cluster, planning, lambda wired: make_plan(wired, job))
    return planning.model_copy(update={"reasons": (*planning.reasons, *missing, *cables)})


def _from_machines(profile: Profile, hosts: Hosts, plan_options: PlanOptions, options: PrepareOptions) -> Planning:
    """Prepare the machines and measure what is unknown or outdated, as a run does before it starts."""
    from distributed.launcher import propose
    from distributed.planning.layouts.divided_plan import fit_or_divide
    from distributed.preparation.preflight import memory_budgets, take_every_gpu
    from distributed.preparation.prepare import prepare
    from training.workers.data_findings import check_data

    check_data(profile)
    machines = prepare(hosts, profile.model.task, options)
    take_every_gpu(profile, machines)
    try:
        profile = fit_or_divide(profile, memory_budgets(profile, machines), options.tell)
        return propose(machines, profile, plan_options, options.tell)[0]
    finally:
        for link, _ in machines:
            link.close()


def _subset(cluster: Cluster, hosts_file: Path) -> tuple[Cluster, tuple[Reason, ...]]:
    """Return the subset of the cluster that a hosts file names, and a reason for each machine without measurements."""
    from distributed.hosts.file import load_hosts
    from distributed.planning.documents.document import Reason

    requested = {machine.name.casefold() for machine in load_hosts(hosts_file).machines}
    measured = {machine.name: machine.machine_name.casefold() for machine in cluster.machines}
    missing = tuple(Reason(code="not-measured", subject=name) for name in sorted(requested - {*measured.values()}))
    return cluster.subset(tuple(name for name, machine in measured.items() if machine in requested)), missing
