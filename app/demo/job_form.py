"""The Job screen of scripted machines: the real options with the scripted profile's values."""

from __future__ import annotations

from collections.abc import Sequence

from app.demo.figures import cluster_of, job_for
from app.demo.job import OPTIONS, SAMPLES, demo_profile
from app.demo.machines import ScriptedMachine
from app.wizard.job_looks import MAIN
from app.wizard.services import JobAnswers
from app.wizard.state import DataRow, FitRow, Job, MachineRow, OptionRow, Status
from distributed.planning import memory_model
from profiles.errors import BadInput
from profiles.options import OptionSpec, as_text, check_value, options

MODELS = ("whisper-tiny", "whisper-small", "whisper-large-v3")
DATASETS = ("scripted-recordings",)


def job_of(answers: JobAnswers) -> Job:
    """Return all options with their values; wrong ones have a cause."""
    changes = {name: text for name, text in answers.options if name not in ("model", "dataset")}
    rows = [_option(spec, changes.get(spec.name)) for spec in options()]
    first = sorted(rows, key=lambda row: _place(row.name))
    chosen = dict(answers.options)
    return Job(
        options=tuple(first),
        models=MODELS,
        datasets=DATASETS,
        model=chosen.get("model", "whisper-small"),
        dataset=chosen.get("dataset", DATASETS[0]),
        status=Status.OK,
    )


def _place(name: str) -> int:
    return MAIN.index(name) if name in MAIN else len(MAIN)


def _option(spec: OptionSpec, changed: str | None) -> OptionRow:
    default = as_text(OPTIONS.get(spec.name, spec.default))
    value = default if changed is None else changed
    problem = check_value(spec.name, value) or ""
    return OptionRow(
        key=spec.name,
        name=spec.name,
        status=Status.FAILED if problem else Status.OK,
        cause=problem,
        value=value,
        default=default,
        help=spec.help,
        unit=spec.unit,
        type=spec.type,
        choices=tuple(spec.choices),
        limits=spec.limits,
        advanced=spec.name not in MAIN,
        changed=changed is not None,
    )


def scripted_data() -> DataRow:
    """Return what was not read anywhere."""
    return DataRow(
        "data",
        "scripted-recordings",
        Status.WARNING,
        words="1 broken file",
        cause="1 of 6,401 files cannot be read (scripted: there is no such data set)",
        fix="it is left out",
        samples=SAMPLES,
        hours=5.3,
        columns=("id", "audio_path", "text"),
        splits=(("train", SAMPLES), ("validation", 240), ("test", 240)),
        broken=("clips/0412.wav",),
        broken_count=1,
    )


def fits(machines: Sequence[tuple[MachineRow, ScriptedMachine]], answers: JobAnswers) -> list[FitRow]:
    """Say for each machine whether the job fits its scripted memory.

    Raises:
        BadInput: an option does not fit.
    """
    if not machines:
        raise BadInput("no machine was picked", "pick one at Machines")
    job = job_for(demo_profile(dict(answers.options)), "fastest")
    cluster = cluster_of([machine for _, machine in machines])
    rows = []
    for row, machine in machines:
        known = cluster.machine(machine.name)
        needed = round(memory_model.member_bytes(job, known, "", job.batch))
        ok = needed <= known.memory_free
        status, words = (Status.OK, "fits") if ok else (Status.FAILED, "too large")
        rows.append(FitRow(row.key, row.name, status, words, needed=needed, free=known.memory_free))
    return rows
