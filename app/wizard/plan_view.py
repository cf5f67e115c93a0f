"""The Plan of a real run in rows: what changes where, what crosses the network and how, and what to type for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from app.wizard.forecasting import Forecast
from app.wizard.job_view import WAYS, resolved
from app.wizard.outside import OUTSIDE, Outside
from app.wizard.records import Change, JobAnswers, Plan, Way
from app.wizard.save import Saving, as_saved, saving, shown
from app.wizard.state import Request
from distributed.planning.fitting import fit
from distributed.preparation.members import rooms_of
from distributed.run.planning import Planned
from profiles.errors import MusterError
from profiles.schema import Profile
from training.strategies.registry import interval_options

SSH = "commands, code, data and logs: SSH"
TLS = "training traffic: TLS with certificates made for this run"
CLEAR = "training traffic of the torch engine: plain TCP, anyone on that network can read it"


class Choices(NamedTuple):
    """What a request amounts to, before any machine is asked."""

    saving: Saving
    profile: Profile
    """As it will be run: as it is saved."""
    planned: Planned | None
    """The run that would be started; ``None`` where nothing is known of its machines yet."""
    fitted: tuple[str, ...]
    """What is changed in the profile so that it fits the machines' memory."""


def choices(request: Request, config: Path | None = None) -> Choices:
    """Return what a request amounts to.

    Raises:
        BadInput: the choices do not fit together.
    """
    kept, found, planned = saving(request, config), request.planning, None
    names = (*WAYS, *interval_options()) if kept.planning is not None else ()
    options = {**dict(request.job.options), **{name: kept.values[name] for name in names if name in kept.values}}
    profile = as_saved(resolved(JobAnswers(request.job.profile, tuple(options.items())), config).profile, kept)
    lines: list[str] = []
    if isinstance(found, Forecast):
        planned = found.planned(kept.planning, fit(profile, rooms_of(profile, found.machines), lines.append))
    return Choices(kept, profile, planned, tuple(lines))


def plan_of(request: Request, config: Path | None = None, outside: Outside = OUTSIDE) -> Plan:
    """Say what will be done. Nothing is changed, and no machine is asked.

    Raises:
        BadInput: the choices do not fit together.
    """
    kept, profile, planned, fitted = choices(request, config)
    run, far, size = planned.plan if planned is not None else None, any(not row.here for row in request.machines), 0
    if run is not None and far:
        with suppress(MusterError, OSError):  # starting will say why
            size = outside.input_bytes(run)
    changes = (*_changes(request, kept, size), *(Change("fit", "every machine", line, "~") for line in fitted))
    engine = run.engine if run is not None else "hub"
    together = run is not None and run.world_size > 1
    return Plan(
        changes=changes,
        bytes_to_copy=sum(change.bytes for change in changes),
        ports=tuple(_ports(far, profile, engine if together else "", hub_place(request, kept))),
        seconds=(request.chosen.seconds or None) if request.chosen is not None else None,
        way=way_in_words(request.chosen, request),
        encrypted=(*((SSH,) if far else ()), *((TLS,) if together and engine == "hub" else ())),
        in_clear=(CLEAR,) if planned is not None and planned.in_clear else (),
        profile=kept.name,
        files=tuple(change.what for change in changes if change.key.startswith("file:")),
        command=kept.command,
        hash=run.hash() if run is not None else "",
    )


def way_in_words(chosen: Way | None, request: Request) -> str:
    """Return how the machines work together, in a few words."""
    if chosen is None or chosen.choice.alone:
        return f"{chosen.choice.over if chosen is not None else request.machines[0].name} alone"
    choice = chosen.choice
    interval = f", one exchange every {chosen.interval} steps" if chosen.periodic else ", an exchange in every step"
    return f"{len(choice.members)} machines with {choice.name} over {choice.over}{interval}"


def _changes(request: Request, kept: Saving, size: int) -> Iterator[Change]:
    """Yield what changes where; ``size``: bytes of code, data and model, of which a machine gets what is missing."""
    for path in kept.files:
        yield Change(f"file:{path.name}", "this computer", shown(path), "~" if path.exists() else "+")
    yield Change("run", "this computer", "the run's folder under output/: events, logs, snapshots, the model")
    settings = kept.planning.settings if kept.planning is not None else None
    for machine, row in zip(kept.hosts.machines, request.machines, strict=True):
        name = machine.name
        if settings is not None and not any(one.name.partition(":")[0] == name for one in settings.members):
            yield Change(f"out:{row.key}", name, "nothing: it is not part of the chosen strategy", "~")
        elif not row.here:
            folder = machine.project_path or "~/.cache/muster"
            yield Change(f"data:{row.key}", name, f"code, data and model in {folder}: what is missing there", "~", size)
            yield Change(f"run:{row.key}", name, f"this run's folder in {folder}; clean removes it")
            yield Change(f"awake:{row.key}", name, "is kept awake while it trains", "~")


def hub_place(request: Request, kept: Saving) -> str:
    """Return the machine of the hub, as the plan names it; this computer where it names none of the others."""
    settings = kept.planning.settings if kept.planning is not None else None
    others = (machine.name for machine, row in zip(kept.hosts.machines, request.machines, strict=True) if not row.here)
    return settings.hub if settings is not None and settings.hub in others else "this computer"


def _ports(far: bool, profile: Profile, engine: str, hub: str) -> Iterator[str]:
    if far:
        yield "SSH from this computer to each machine"
    if engine == "hub":
        yield f"TCP {profile.strategy.hub_port or 'one free port'} on {hub}, from each machine (the hub)"
    elif engine:
        yield "free TCP ports between all machines (the torch engine)"
