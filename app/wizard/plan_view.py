"""The Plan of a real run in rows: what changes where, what crosses the network and how, and what to type for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from app.wizard.forecasting import Forecast
from app.wizard.job_view import WAYS, resolved
from app.wizard.outside import OUTSIDE, Outside
from app.wizard.records import Change, Plan, Way
from app.wizard.save import Saving, as_saved, saving, shown
from app.wizard.services import Request
from distributed.planning.document import Planning
from distributed.planning.fitting import fit
from distributed.preparation.members import rooms_of
from distributed.run.planning import Planned
from profiles.errors import MusterError
from profiles.schema import Profile
from training.plan import RunPlan
from training.strategies.registry import interval_options

SSH = "commands, code, data and logs: SSH"
TLS = "training traffic: TLS with certificates made for this run"
CLEAR = "training traffic of the torch engine: plain TCP, whoever is on that network can read it"


def chosen_planning(request: Request) -> Planning | None:
    """Return the plan document of the chosen way; ``None`` for one machine: there is nothing to choose."""
    found = request.planning
    if not isinstance(found, Forecast) or len(request.machines) < 2:
        return None
    return found.planning_of(request.chosen)


def plan_of(request: Request, config: Path | None = None, outside: Outside = OUTSIDE) -> Plan:
    """Say what will be done. Nothing is changed, and no machine is asked.

    Raises:
        BadInput: the choices do not fit together.
    """
    planning, kept, profile = _choices(request, config)
    planned = _planned(request, planning, profile)
    run = planned.plan if planned is not None else None
    size = _bytes(run, outside) if run is not None and any(not row.here for row in request.machines) else 0
    changes = (*_changes(request, kept, planning, size), *_fitted(profile, request))
    engine = run.engine if run is not None else "hub"
    together = run is not None and run.world_size > 1
    return Plan(
        changes=changes,
        bytes_to_copy=sum(change.bytes for change in changes),
        ports=tuple(_ports(request, profile, engine if together else "", hub_place(request, kept, planning))),
        seconds=(request.chosen.seconds or None) if request.chosen is not None else None,
        way=way_in_words(request.chosen, request),
        encrypted=tuple(_encrypted(request, engine, together)),
        in_clear=(CLEAR,) if planned is not None and planned.in_clear else (),
        profile=kept.name,
        files=tuple(change.what for change in changes if change.key.startswith("file:")),
        command=kept.command,
        hash=run.hash() if run is not None else "",
    )


def planned_run(request: Request, config: Path | None = None) -> Planned | None:
    """Return the run that would be started; ``None`` where nothing is known of its machines yet.

    Raises:
        BadInput: the choices do not fit together.
    """
    planning, _, profile = _choices(request, config)
    return _planned(request, planning, profile)


def _choices(request: Request, config: Path | None) -> tuple[Planning | None, Saving, Profile]:
    planning = chosen_planning(request)
    kept = saving(request, planning, config)
    return planning, kept, profile_of(request, planning, kept, config)


def profile_of(request: Request, planning: Planning | None, kept: Saving, config: Path | None) -> Profile:
    """Return the profile as it will be run: as it is saved."""
    chosen = {
        name: kept.values[name] for name in (*WAYS, *interval_options()) if planning is not None and name in kept.values
    }
    answers = type(request.job)(request.job.profile, tuple({**dict(request.job.options), **chosen}.items()))
    return as_saved(resolved(answers, config).profile, kept)


def _planned(request: Request, planning: Planning | None, profile: Profile) -> Planned | None:
    found = request.planning
    if not isinstance(found, Forecast):
        return None
    return found.planned(planning, fit(profile, rooms_of(profile, found.machines)))


def _fitted(profile: Profile, request: Request) -> Iterator[Change]:
    """Yield what is changed in the profile so that it fits the machines' memory."""
    lines: list[str] = []
    if isinstance(request.planning, Forecast):
        fit(profile, rooms_of(profile, request.planning.machines), lines.append)
    for line in lines:
        yield Change("fit", "every machine", line, "~")


def way_in_words(chosen: Way | None, request: Request) -> str:
    """Return how the machines work together, in a few words."""
    if chosen is None or chosen.choice.alone:
        return f"{chosen.choice.over if chosen is not None else request.machines[0].name} alone"
    choice = chosen.choice
    interval = f", one exchange every {chosen.interval} steps" if chosen.periodic else ", an exchange in every step"
    return f"{len(choice.members)} machines with {choice.name} over {choice.over}{interval}"


def _bytes(run: RunPlan, outside: Outside) -> int:
    """Return the bytes of code, data and model, of which a machine gets what it lacks; 0: starting will say why."""
    try:
        return outside.input_bytes(run)
    except (MusterError, OSError):
        return 0


def _changes(request: Request, kept: Saving, planning: Planning | None, size: int) -> Iterator[Change]:
    for path in kept.files:
        yield Change(f"file:{path.name}", "this computer", shown(path), "~" if path.exists() else "+")
    yield Change("run", "this computer", "the run's folder under output/: events, logs, snapshots, the model")
    members = None if planning is None or planning.settings is None else planning.settings.members
    for machine, row in zip(kept.hosts.machines, request.machines, strict=True):
        name = machine.name
        if members is not None and not any(one.name.partition(":")[0] == name for one in members):
            yield Change(f"out:{row.key}", name, "nothing: the chosen way leaves it out", "~")
        elif not row.here:
            folder = machine.project_path or "~/.cache/muster"
            yield Change(f"data:{row.key}", name, f"code, data and model in {folder}: what it lacks of them", "~", size)
            yield Change(f"run:{row.key}", name, f"this run's folder in {folder}; clean takes it away")
            yield Change(f"awake:{row.key}", name, "is kept from sleeping while it trains", "~")


def hub_place(request: Request, kept: Saving, planning: Planning | None) -> str:
    """Return the machine of the hub, as the plan names it; this computer where it names none of the others."""
    hub = planning.settings.hub if planning is not None and planning.settings is not None else ""
    others = (machine.name for machine, row in zip(kept.hosts.machines, request.machines, strict=True) if not row.here)
    return hub if hub in others else "this computer"


def _ports(request: Request, profile: Profile, engine: str, hub: str) -> Iterator[str]:
    if any(not row.here for row in request.machines):
        yield "SSH from this computer to each machine"
    if engine == "hub":
        port = profile.strategy.hub_port
        yield f"TCP {port or 'one free port'} on {hub}, from each machine (the hub)"
    elif engine:
        yield "free TCP ports between all machines (the torch engine)"


def _encrypted(request: Request, engine: str, together: bool) -> Iterator[str]:
    if any(not row.here for row in request.machines):
        yield SSH
    if together and engine == "hub":
        yield TLS
