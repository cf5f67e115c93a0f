"""Does the job fit a machine: its model into the memory, its data there or how much must travel, the port of its hub.

Pure functions, but for :func:`judge_port`, which tries.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from distributed.checks.findings import Finding, Health, Level
from distributed.measuring.machine_figures import SpeedFigures
from distributed.planning.fitting import DOUBT, Room, fitted
from distributed.planning.job import job_of
from distributed.planning.memory_model import estimated_bytes, member_bytes
from distributed.planning.model_size import ModelSize
from distributed.preparation.preflight import FREE_BYTES, Facts
from distributed.preparation.transfer import Lack, Tree
from profiles.errors import BadInput
from profiles.options import less_memory
from profiles.schema import Profile
from training.strategies.registry import usual_strategy

_ESTIMATED = "estimated"
_NAMES = {
    "inputs/code": "code",
    "inputs/user": "your code",
    "inputs/model": "model",
    "inputs/teacher": "teacher",
    "inputs/encoder": "encoder",
    "inputs/dataset": "data",
}


def judge_memory(profile: Profile, size: ModelSize | None, measured: SpeedFigures | None, health: Health) -> Finding:
    """Compare what a member needs with what is free; what was measured there stands before what is estimated."""
    if measured is not None and any(one.peak for one in measured.machine.measurements):
        return _judged(profile, measured_bytes(profile, measured), "as measured there", health)
    if size is None:
        return Finding(
            "model", "ok", "the memory that the model needs is not known before it runs", "", "measure tells"
        )
    try:
        found = fitted(profile, size, [Room("it", free_memory(health)[1])], alone=False)
    except BadInput as error:
        return Finding("model", "problem", error.message, "fits into the memory", error.hint)
    judged = _judged(profile, found.needs or estimated_bytes(profile, size), _ESTIMATED, health)
    return judged._replace(seen=f"{judged.seen}; {found.line}") if found.changes else judged


def measured_bytes(profile: Profile, figures: SpeedFigures) -> int:
    """Return the peak with the profile's batch, from short runs of the task there."""
    job, strategy = job_of(profile, figures.workload), profile.strategy.strategy
    return member_bytes(job, figures.machine, usual_strategy() if strategy == "auto" else strategy, job.batch)


def _judged(profile: Profile, need: int, how: str, health: Health) -> Finding:
    free, total = free_memory(health)
    seen = f"about {_gigabytes(need)} GB needed ({how}), {_gigabytes(free)} of {_gigabytes(total)} GB free"
    level = memory_level(need, free, total, estimated=how == _ESTIMATED)
    if level == "ok":
        return Finding("model", level, seen, "fits into the memory")
    less = ", ".join(["lower batch_size (and raise gradient_accumulation)", *less_memory(profile.model.task)])
    if level == "problem":
        return Finding("model", level, seen, "fits into the memory", f"{less}, or take a smaller model")
    return Finding("model", level, seen, "fits into what is free", f"close programs there, or {less}")


def memory_level(need: int, free: int, total: int, estimated: bool) -> Level:
    """Return what it means that so many bytes are needed: a problem where the machine has not so many in all, a warning
    where other programs have them.

    Args:
        free: 0: unknown; so is ``total``.
    """
    if total and need > total * (DOUBT if estimated else 1):
        return "problem"
    return "warning" if free and need > free else "ok"


def free_memory(health: Health) -> tuple[int, int]:
    """Return free and total bytes of the smallest device that trains."""
    cuda = any(one.device.startswith("cuda") and not one.problem for one in health.devices)
    known = [(gpu.free, gpu.total) for gpu in health.nvidia if gpu.free is not None and gpu.total]
    return min(known) if cuda and known else (health.memory.free, health.memory.total)


def judge_data(trees: Mapping[str, Tree], lack: Lack, facts: Facts) -> list[Finding]:
    """Say of code, model and data whether they are there, equal by hash; what is not there must fit on the disk."""
    found = []
    for place, tree in trees.items():
        name = _NAMES.get(place, place)
        if tree.name not in lack.trees:
            found.append(Finding("data", "ok", f"{name}: there, equal by hash ({tree.name[:12]})"))
            continue
        sizes = {blob: path.stat().st_size for blob, path in tree.sources.items()}
        left = sum(sizes[blob] - lack.begun.get(blob, 0) for blob in lack.blobs if blob in sizes)
        total = sum(sizes.values())
        state = "absent" if left == total else "partly there" if left else "there, not assembled"
        found.append(
            Finding("data", "ok", f"{name}: {state}, a run sends {_megabytes(left)} of {_megabytes(total)} MB")
        )
    room = lack.left({blob: path for tree in trees.values() for blob, path in tree.sources.items()})
    if facts.free < FREE_BYTES + room:
        seen = f"{_megabytes(facts.free)} MB free, a run sends {_megabytes(room)} MB"
        fix = "free some space there, or set 'project_path' to another disk"
        found.append(Finding("disk", "problem", seen, f"{_megabytes(FREE_BYTES + room)} MB", fix))
    return found


def judge_origin(profile: Profile) -> list[Finding]:
    """Say what every machine gets from the hub of models and data sets by itself."""
    local = ("/", "./", "../", "~")
    model = profile.model
    named = {"data": profile.data.dataset_path, "model": model.model_path}
    named |= {"teacher": model.teacher_path, "encoder": model.encoder_path}
    if profile.model.task == "custom":
        named["model"] = ""
    wanted = {what: name for what, name in named.items() if name and not name.startswith(local)}
    return [
        Finding("data", "ok", f"{what}: each machine gets {name} from the hub itself") for what, name in wanted.items()
    ]


def judge_port(port: int) -> list[Finding]:
    """Try the port that a profile fixes for the hub, on this machine; nothing where any free one will do."""
    if not port:
        return []
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        seen = f"port {port} of the machine that starts the run cannot be used ({error.strerror or error})"
        fix = "end the program that has it (lsof -i), or set hub_port = 0 for any free one"
        return [Finding("hub port", "problem", seen, "free for the hub", fix)]
    return [Finding("hub port", "ok", f"port {port} of the machine that starts the run is free")]


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}" if size >= 10_000_000 else f"{size / 1e6:.1f}"
