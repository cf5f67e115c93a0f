"""Checks a job against machines that are ready: whether its model fits into memory, how much data must be sent, and
whether its coordinator's port is free.

:func:`check_job` queries the machines; the ``judge_*`` are pure functions, except :func:`judge_port`.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from distributed.checks.findings import Finding, Health, Level
from distributed.checks.lending import HINT, lending_problem
from distributed.checks.machine_data import machine_data_findings
from distributed.hosts.lending import PERMITS
from distributed.machine.link import MachineLink
from distributed.measuring.machine_figures import SpeedFigures, placements_of
from distributed.measuring.measure import cached_speeds
from distributed.planning.documents.cluster import MeasurementCache
from distributed.planning.documents.document import job_of
from distributed.planning.memory.fitting import ESTIMATE_TOLERANCE, FreeMemory, fit_to_budgets
from distributed.planning.memory.memory_model import member_bytes
from distributed.preparation.code_sync import Inputs, collect
from distributed.preparation.members import plan_run
from distributed.preparation.preflight import FREE_BYTES, Facts, Ready
from distributed.preparation.transfer import MissingFiles, Tree, ask_missing, sources_of
from profiles.errors import BadInput, MusterError
from profiles.options import auxiliary_models, memory_saving_settings
from profiles.quantities import bytes_text, memory_text
from profiles.schema import Profile
from training.strategies.registry import default_strategy
from training.tasks.inputs.model_size import ModelSize
from training.tasks.published_models import with_local_model
from training.tasks.registry import size_for

_ESTIMATED = "estimated"
_NAMES = {
    "inputs/code": "code",
    "inputs/user": "your code",
    "inputs/optimizer": "your optimizer",
    "inputs/outer": "your outer optimizer",
    "inputs/strategy": "your strategy",
    "inputs/model": "model",
    "inputs/dataset": "data",
}


@dataclass
class JobFindings:
    """The findings about a job."""

    profile: Profile
    size: ModelSize | None = None
    measured: dict[str, SpeedFigures] = field(default_factory=dict)
    """Earlier measurements of the task, by machine name."""
    everywhere: list[Finding] = field(default_factory=list)
    """Findings that apply to every machine."""
    local: list[Finding] = field(default_factory=list)
    """Findings about the machine that starts the run."""
    data: dict[str, list[Finding]] = field(default_factory=dict)
    """Findings about data, by machine."""

    def of(self, name: str, health: Health | None) -> list[Finding]:
        """Return the findings of one machine."""
        memory = [judge_memory(self.profile, self.size, self.measured.get(name), health)] if health else []
        return [*memory, *self.data.get(name, []), *self.everywhere]


def check_job(profile: Profile, machines: Sequence[Ready], cache: MeasurementCache | None = None) -> JobFindings:
    """Check a job against connected machines; nothing is written on them.

    A problem of the job itself is a finding of every machine.
    """
    local_findings, everywhere = judge_port(profile.strategy.coordinator_port), judge_origin(with_local_model(profile))
    look = JobFindings(profile, size_for(profile), local=local_findings, everywhere=everywhere)
    if not machines:
        return look
    try:
        plan = plan_run(profile, machines)
        inputs = collect(plan)
    except MusterError as error:
        look.everywhere.append(Finding("data", "problem", error.message, "a job that can be read", error.hint))
        return look
    placements = placements_of(machines, plan.members)
    speeds = cached_speeds(placements, inputs, cache or MeasurementCache())
    look.measured = {p.link.name: speeds[p.member.name] for p in placements if p.member.name in speeds}
    with ThreadPoolExecutor(len(machines)) as pool:
        answers = pool.map(lambda machine: _data(inputs, *machine), machines)
        look.data = dict(zip((link.name for link, _ in machines), answers, strict=True))
    for name, findings in machine_data_findings(profile, [link for link, _ in machines], plan.members).items():
        look.data[name] += findings
    return look


def _data(inputs: Inputs, link: MachineLink, facts: Facts) -> list[Finding]:
    try:
        trees = inputs.trees.values()
        missing = ask_missing(link, [tree.name for tree in trees], sorted(sources_of(trees)))
        return [*judge_data(inputs.trees, missing, facts), *judge_lending(inputs, link, missing.trees)]
    except MusterError as error:
        return [Finding("data", "warning", f"its data could not be checked: {error.message_for(link.name)}")]


def judge_memory(profile: Profile, size: ModelSize | None, measured: SpeedFigures | None, health: Health) -> Finding:
    """Compare the memory that a member needs with what is free; measurements take precedence over estimates."""
    if measured is not None and any(measurement.peak for measurement in measured.machine.measurements):
        job, strategy = job_of(profile, measured.workload), profile.strategy.strategy
        chosen = default_strategy() if strategy == "auto" else strategy
        need = member_bytes(job, measured.machine, chosen, job.batch)
        return _judged(profile, need, "as measured there", health)
    if size is None:
        unknown = "how much memory the model needs is not known before it has run"
        return Finding("model", "ok", unknown, fix="'machines measure' determines it")
    memory = free_memory(health, profile.training.device)
    try:
        fit = fit_to_budgets(profile, size, [memory.budget("it")], alone=False)
    except BadInput as error:
        return Finding("model", "problem", error.message, "fits into memory", error.hint)
    finding = _judged(profile, fit.bytes_after or memory.need(profile, size), _ESTIMATED, health)
    return finding._replace(seen=f"{finding.seen}; {fit.line}") if fit.changes else finding


def _judged(profile: Profile, need: int, source: str, health: Health) -> Finding:
    free, total, *_ = free_memory(health, profile.training.device)
    seen = f"about {memory_text(need)} needed ({source}), {memory_text(free)} of {memory_text(total)} free"
    level = memory_level(need, free, total, estimated=source == _ESTIMATED)
    less = ", ".join(
        ["lower batch_size (and raise gradient_accumulation)", *memory_saving_settings(profile.model.task)]
    )
    fixes = {"ok": "", "warning": f"close programs there, or {less}", "problem": f"{less}, or take a smaller model"}
    needed = "fits into the free memory" if level == "warning" else "fits into memory"
    return Finding("model", level, seen, needed, fixes[level])


def memory_level(need: int, free: int, total: int, estimated: bool) -> Level:
    """Return the level of a need for memory: a problem where the machine has too little in total, a warning where other
    programs occupy it.

    Args:
        free: free bytes; 0: unknown, as for ``total``.
    """
    if total and need > total * (ESTIMATE_TOLERANCE if estimated else 1):
        return "problem"
    return "warning" if free and need > free else "ok"


def free_memory(health: Health, device: str) -> FreeMemory:
    """Return the memory of the smallest training device for a job with ``auto``, ``cpu``, ``cuda`` or ``mps``."""
    working = [result for result in health.devices if not result.problem]
    cuda = [result for result in working if result.device.startswith("cuda")]
    gpu_memory = [(gpu.free, gpu.total) for gpu in health.nvidia if gpu.free is not None and gpu.total]
    if device in ("auto", "cuda") and cuda and gpu_memory:
        return FreeMemory(*min(gpu_memory), "cuda", all(result.bf16 for result in cuda))
    metal = device == "mps" or (device == "auto" and any(result.device == "mps" for result in working))
    return FreeMemory(health.memory.free, health.memory.total, "mps" if metal else "cpu")


def judge_data(trees: Mapping[str, Tree], missing: MissingFiles, facts: Facts) -> list[Finding]:
    """Return findings on whether code, model and data are present with the same hash; missing files must fit on the
    disk."""
    findings = []
    for folder, tree in trees.items():
        name = _NAMES.get(folder, folder.removeprefix("inputs/"))
        if tree.name not in missing.trees:
            findings.append(Finding("data", "ok", f"{name}: already there, with the same hash ({tree.name[:12]})"))
            continue
        sizes = {blob: path.stat().st_size for blob, path in tree.sources.items()}
        left = sum(sizes[blob] - missing.begun.get(blob, 0) for blob in missing.blobs if blob in sizes)
        total = sum(sizes.values())
        state = "absent" if left == total else "partly there" if left else "sent, not assembled yet"
        seen = f"{name}: {state}, a run sends {bytes_text(left)} of {bytes_text(total)}"
        findings.append(Finding("data", "ok", seen))
    missing_bytes = missing.missing_bytes(sources_of(trees.values()))
    if facts.free < FREE_BYTES + missing_bytes:
        seen = f"{bytes_text(facts.free)} free, a run sends {bytes_text(missing_bytes)}"
        fix = "free some space there, or set 'project_path' to another disk"
        findings.append(Finding("disk", "problem", seen, bytes_text(FREE_BYTES + missing_bytes), fix))
    return findings


def judge_lending(inputs: Inputs, link: MachineLink, missing: Collection[str]) -> list[Finding]:
    """Return a finding on whether a machine that is lent runs the job; empty for other machines.

    Args:
        missing: names of the trees that are not there.
    """
    if not link.runs_own_program:
        return []
    needed = f"class {link.lend}: {PERMITS[link.lend]}"
    problem = lending_problem(inputs, missing)
    return [Finding("lending", "problem" if problem else "ok", problem or f"lent as {needed}", needed, HINT)]


def judge_origin(profile: Profile) -> list[Finding]:
    """Return findings on what every machine downloads by itself from the model and data hub."""
    local = ("/", "./", "../", "~")
    model = profile.model
    named = {
        "data": profile.data.dataset_path,
        "model": "" if model.trait == "own code" else model.model_path,
        **{name.removesuffix("_path"): path for name, path in auxiliary_models(profile).items()},
    }
    downloads = [(kind, name) for kind, name in named.items() if name and not name.startswith(local)]
    return [Finding("data", "ok", f"{kind}: each machine gets {name} from the hub itself") for kind, name in downloads]


def judge_port(port: int) -> list[Finding]:
    """Test the coordinator port of a profile on this machine; empty where any free port will do."""
    if not port:
        return []
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        seen = f"port {port} of the machine that starts the run cannot be used ({error.strerror or error})"
        fix = "end the program that has it (lsof -i), or set coordinator_port = 0 for any free one"
        return [Finding("coordinator port", "problem", seen, "free for the coordinator", fix)]
    return [Finding("coordinator port", "ok", f"port {port} of the machine that starts the run is free")]
