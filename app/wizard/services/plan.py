"""The plan of a real run: the files written on confirmation, and its changes, network use and command for display.

``profiles/saved/NAME.ini`` is the profile. ``NAME.hosts.json`` beside it lists the machines, ``NAME.plan.json`` holds
the chosen candidate plan; ``distributed-train NAME --plan NAME.plan.json`` runs exactly that. A run without some of the
profile's machines leaves both as they are: its candidate plan is ``NAME.partial.plan.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from app.console import command_line
from app.wizard.services.forecasting import Forecast
from app.wizard.services.job_view import WAYS, resolved
from app.wizard.services.machines import entries_of, hosts_of
from app.wizard.services.outside import Outside
from app.wizard.state.records import CandidateRow, JobAnswers, MachineChange, PlanPreview
from app.wizard.state.state import PlanRequest
from app.wizard.state.ways import rhythm_text
from distributed.hosts.file import Hosts, Machine, dump_hosts, load_hosts, save_hosts
from distributed.launcher import PlannedRun
from distributed.planning.documents.document import Planning
from distributed.planning.layouts.divided_plan import fit_or_divide
from distributed.planning.reasons import in_use
from distributed.planning.run_time import together_text
from distributed.preparation.preflight import memory_budgets
from profiles.errors import BadInput, MusterError
from profiles.files.layers import DEFAULT
from profiles.files.library import Library, check_name, saved_folder
from profiles.files.resolve import load_profile, save_profile
from profiles.installation import RUNS_FOLDER, relative_path, shown_path
from profiles.locations import absolute_path
from profiles.options import as_text, has_effect, options_by_name
from profiles.quantities import bytes_text
from profiles.run_settings import FITTED
from profiles.schema import Profile
from profiles.split import DATA_STAY
from training.records.plan import RunPlan
from training.strategies.registry import interval_options
from training.workers.data_findings import warm_up_remark

_NOT_KEPT = ("hosts", "workers", "layout", "stages", "offload", "simulate", "shares")
_REFERENCES = ("model", "dataset")
SSH = "commands, code, data and logs: SSH"
TLS = "training traffic: TLS with certificates made for this run"
CLEAR = "training traffic of engine nccl: plain TCP, anyone on that network can read it"


@dataclass(frozen=True)
class Saving:
    """Files that would be written, and their contents."""

    name: str
    values: Mapping[str, str]
    """Options and references (model, data set) of the profile."""
    hosts: Hosts
    """The machines of this run."""
    kept: tuple[Machine, ...]
    """Machines that stay in the saved profile although this run goes without them."""
    planning: Planning | None
    """``None`` for a single machine: there is nothing to choose."""
    ini: Path
    hosts_file: Path
    plan_file: Path

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.ini, self.hosts_file, *((self.plan_file,) if self.planning is not None else ()))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Command-line arguments that start exactly this run once it is saved."""
        plan = ("--plan", relative_path(self.plan_file)) if self.planning is not None else ()
        return ("distributed-train", self.name, *plan, *(("--allow-missing",) if self.kept else ()))

    @property
    def all_hosts(self) -> Hosts:
        """The machines of the saved profile."""
        return self.hosts.model_copy(update={"machines": (*self.hosts.machines, *self.kept)})

    def write(self, config: Path | None) -> tuple[str, ...]:
        """Write all files atomically, the profile last, so that it never refers to missing files.

        Raises:
            BadInput: a name is taken, or a folder cannot be written.
        """
        check_name(self.name)
        self.ini.parent.mkdir(parents=True, exist_ok=True)
        fresh = [path for path in (self.hosts_file, self.plan_file) if not path.exists()]
        try:
            save_hosts(self.all_hosts, self.hosts_file)
            if self.planning is not None:
                self.planning.write(self.plan_file)
            save_profile(self.name, self.values, config)
        except BaseException:
            for path in fresh:
                with suppress(OSError):
                    path.unlink()
            raise
        return tuple(map(relative_path, self.files))


def saving(request: PlanRequest, config: Path | None = None) -> Saving:
    """Return what confirming would write; with two machines or more it includes the chosen candidate plan.

    Raises:
        BadInput: the profile cannot be used, or the name is not a valid profile name.
    """
    taken = request.planning if len(request.machines) > 1 else None
    planning = taken.planning_of(request.chosen) if isinstance(taken, Forecast) else None
    library = Library.open(config)
    folder = saved_folder(library.config.path.resolve())
    hosts = hosts_of(request.machines)
    values = _values(request, planning, library, config)
    name = request.answers.save_as or _free_name(request, values, hosts, library, folder)
    check_name(name)
    hosts_file = folder / f"{name}.hosts.json"
    kept = _kept(request, hosts, library)
    plan_file = folder / f"{name}.{'partial.' if kept else ''}plan.json"
    values = {**values, "hosts": str(hosts_file)}
    return Saving(name, values, hosts, kept, planning, folder / f"{name}.ini", hosts_file, plan_file)


def _kept(request: PlanRequest, hosts: Hosts, library: Library) -> tuple[Machine, ...]:
    """Return the machines of the saved profile that this run goes without: absent this evening, they stay in it."""
    profile = library.find("profile", request.answers.job.profile)
    entry = profile.section.entries.get("hosts") if profile is not None else None
    if profile is None or entry is None or profile.file.path == library.config.path or not request.left_out:
        return ()
    listed: tuple[Machine, ...] = ()
    with suppress(BadInput):  # then it is written anew
        listed = load_hosts(Path(absolute_path(entry.value, profile.file.path.parent))).machines
    wanted = {name for row in request.left_out for name in (row.name.casefold(), row.entry.endpoint)}
    taken = {name for one in hosts.machines for name in (one.name.casefold(), one.endpoint)}
    names_of = ((one, {one.name.casefold(), one.endpoint}) for one in listed)
    return tuple(one for one, names in names_of if names & wanted and not names & taken)


def _values(request: PlanRequest, planning: Planning | None, library: Library, config: Path | None) -> dict[str, str]:
    """Return every option that is not a default, so that the profile is complete by itself.

    Strategy, engine and codec stay ``auto`` if the recommended candidate plan was taken: later measurements may differ.
    """
    found = resolved(request.answers.job, config)
    profile = found.profile
    values = {
        kind: text
        for kind in _REFERENCES
        if (text := getattr(profile, f"{kind}_name")) and library.find(kind, text) is not None
    }
    values |= {
        name: found.value(name)
        for name, origin in found.origins.items()
        if origin != DEFAULT
        and name not in _NOT_KEPT
        and found.value(name)
        and options_by_name()[name].is_read_by(profile.model.task)
    }
    if values.keys() & {*FITTED, "gradient_accumulation"}:  # what is left to the fitting stays open
        values["fit_memory"] = found.value("fit_memory")
    taken = request.chosen
    recommended = taken is None or (taken.recommended and taken.interval == taken.best_interval)
    if planning is not None and not recommended and planning.settings is not None:
        chosen = planning.settings.options
        values |= {name: as_text(chosen[name]) for name in _chosen_options() if name in chosen}
    strategy = values.get("strategy", profile.strategy.strategy)
    return {name: value for name, value in values.items() if has_effect(name, strategy)}


def _chosen_options() -> tuple[str, ...]:
    """Return the plan options that are saved in the profile when the candidate plan was chosen by hand."""
    return (*WAYS, "error_feedback", *interval_options())


def _free_name(request: PlanRequest, values: Mapping[str, str], hosts: Hosts, library: Library, folder: Path) -> str:
    """Return the saved profile's own name, or a name that is unused or already holds exactly these choices."""
    base = request.answers.job.profile
    known = library.find("profile", base)
    if known is not None and known.file.path != library.config.path:
        return base
    members = len(hosts.machines)
    stem = f"{base}-here" if members == 1 and hosts.machines[0].is_local else f"{base}-{members}-machines"
    taken = {name.casefold() for name in library.names("profile")} | {path.stem.casefold() for path in library.broken}
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(
        name for name in names if name.casefold() not in taken or _is_the_same(name, values, hosts, library, folder)
    )


def _is_the_same(name: str, values: Mapping[str, str], hosts: Hosts, library: Library, folder: Path) -> bool:
    saved = library.find("profile", name)
    if saved is None or saved.file.path.parent != folder:
        return False
    try:
        before = load_profile(name, {}, library.config.path).profile
        expected = load_profile(name, {**values, "hosts": before.run.hosts}, library.config.path).profile
        keys = saved.section.entries.keys() - {"description", "hosts"}
        return (
            keys == values.keys()
            and before == expected
            and dump_hosts(load_hosts(Path(before.run.hosts))) == dump_hosts(hosts)
        )
    except BadInput:
        return False


# ------------------------------------------------------------------------------------------------------------ as rows


class Choices(NamedTuple):
    """The settings that follow from a request, before any machine is contacted."""

    saving: Saving
    profile: Profile
    """The profile as it is saved and run."""
    planned: PlannedRun | None
    """The run that would be started; ``None`` if its machines have not been measured."""
    fitted: tuple[str, ...]
    """Changes that make the profile fit the machines' memory."""


def choices(request: PlanRequest, config: Path | None = None) -> Choices:
    """Return the settings that follow from a request.

    Raises:
        BadInput: the choices are inconsistent.
    """
    saved, forecast, planned = saving(request, config), request.planning, None
    names = _chosen_options() if saved.planning is not None else ()
    options = {
        **dict(request.answers.job.options),
        **{name: saved.values[name] for name in names if name in saved.values},
    }
    chosen = options.get("strategy", "auto")
    options = {name: value for name, value in options.items() if has_effect(name, chosen)}
    profile = resolved(JobAnswers(request.answers.job.profile, tuple(options.items())), config).profile
    as_in_its_file = {f"{kind}_name": saved.values.get(kind, "") for kind in _REFERENCES}  # paths are options there
    profile = profile.model_copy(update={"name": saved.name, **as_in_its_file})
    lines: list[str] = []
    if isinstance(forecast, Forecast):
        planned = forecast.planned(
            saved.planning, fit_or_divide(profile, memory_budgets(profile, forecast.machines), lines.append)
        )
    return Choices(saved, profile, planned, tuple(lines))


def plan_of(request: PlanRequest, config: Path | None, outside: Outside) -> PlanPreview:
    """Describe what the run will do. Changes nothing, and contacts no machine.

    Raises:
        BadInput: the choices are inconsistent.
    """
    saved, profile, planned, fitted = choices(request, config)
    run, far = planned.plan if planned is not None else None, any(not row.here for row in request.machines)
    sizes: Mapping[str, int] = {}
    if run is not None and far:
        with suppress(MusterError, OSError):  # starting the run reports the error
            sizes = outside.input_sizes(run)
    copying = Copying(sizes, _files_there(request), profile.data.local_data)
    changes = (
        *_changes(request, saved, copying),
        *(MachineChange("fit", "every machine", line, "~") for line in fitted),
    )
    engine = run.engine if run is not None else "mesh"
    together = run is not None and run.world_size > 1
    return PlanPreview(
        changes=changes,
        copying=copying.summary(changes),
        network=tuple(_network(far, profile, engine if together else "", coordinator_place(saved))),
        time=(*_time(request), *_remarks(run)),
        way=way_in_words(request.chosen, request),
        encrypted=(*((SSH,) if far else ()), *((TLS,) if together and engine == "mesh" else ())),
        in_clear=(CLEAR,) if run is not None and run.in_clear else (),
        about_data=_about_data(profile),
        left_out=left_out_text(saved),
        profile=saved.name,
        files=tuple(map(relative_path, saved.files)),
        command=command_line(*saved.arguments),
        hash=run.hash() if run is not None else "",
    )


def left_out_text(saved: Saving) -> str:
    """Return which machines of the saved profile the run goes without; empty: it has all of them."""
    names, them = " and ".join(one.name for one in saved.kept), "it" if len(saved.kept) == 1 else "them"
    return f"this run without {names}; the saved profile keeps {them}" if names else ""


def _time(request: PlanRequest) -> tuple[str, ...]:
    """Return sentences about the predicted time, and why it may be wrong; empty: it was not measured."""
    chosen, forecast = request.chosen, request.planning
    if chosen is None or chosen.time is None:
        return ()
    planning = forecast.planning if isinstance(forecast, Forecast) else None
    return (*chosen.time.sentences, *(f"Warning: {text}." for text in in_use(planning)))


def _remarks(run: RunPlan | None) -> tuple[str, ...]:
    """Return what is odd about the steps of a run, in sentences."""
    with suppress(MusterError):  # Job reports data that cannot be used
        if run is not None and (remark := warm_up_remark(run)):
            return (f"Warning: {remark}.",)
    return ()


def _about_data(profile: Profile) -> str:
    """Return where the data stay, and what is done with them before the first step; empty: nothing to be said."""
    staying = DATA_STAY if profile.data.local_data else ""
    preparing = "recordings new to a machine are prepared there first, once" if profile.model.trait == "speech" else ""
    return "; ".join(filter(None, (staying, preparing)))


def way_in_words(chosen: CandidateRow | None, request: PlanRequest) -> str:
    """Return a short description of which machines train and how often they synchronise."""
    if chosen is None:
        return together_text((request.machines[0].name,))
    members = together_text(chosen.choice.members, chosen.choice.blocks)
    return ", ".join(filter(None, (members, rhythm_text(chosen))))


@dataclass(frozen=True)
class Copying:
    """The files of a run, and those of them that machines have already."""

    sizes: Mapping[str, int]
    """Bytes of each file, by SHA-256."""
    files_there: Mapping[str, frozenset[str]]
    """SHA-256 of the files on a machine, by its name; one that is not in it may have them or not."""
    data_stay: bool
    """Whether data stay on their machines."""

    @property
    def copied_parts(self) -> str:
        return "code and model" if self.data_stay else "code, data and model"

    def change(self, key: str, name: str, folder: str) -> MachineChange:
        """Return what is copied to a machine, and at most how much."""
        size = sum(size for blob, size in self.sizes.items() if blob not in self.files_there.get(name, ()))
        description = f"copies what is missing of {self.copied_parts} to {folder}"
        if self.sizes and not size:
            description = f"has {self.copied_parts} in {folder} already: nothing is copied"
        return MachineChange(f"data:{key}", name, description, "~", size)

    def summary(self, changes: Sequence[MachineChange]) -> str:
        """Return how much is copied to all machines; empty where nothing is sent to any."""
        copies = [change for change in changes if change.key.startswith("data:")]
        size = sum(change.bytes for change in copies)
        if not copies or not self.sizes:
            return ""
        if not size:
            return f"nothing: {self.copied_parts} are there"
        is_known, amount = all(change.machine in self.files_there for change in copies), bytes_text(size)
        return f"{amount} that the machines lack" if is_known else f"up to {amount}: only what is missing"


def _files_there(request: PlanRequest) -> Mapping[str, frozenset[str]]:
    return request.planning.files_there if isinstance(request.planning, Forecast) else {}


def _changes(request: PlanRequest, saved: Saving, copying: Copying) -> Iterator[MachineChange]:
    """Yield the changes on each machine."""
    unchanged = (saved.hosts_file,) if saved.kept else ()
    for path in (path for path in saved.files if path not in unchanged):
        yield MachineChange(f"file:{path.name}", "this computer", shown_path(path), "~" if path.exists() else "+")
    run = f"the run's folder in {relative_path(RUNS_FOLDER)}: events, logs, snapshots, the model"
    yield MachineChange("run", "this computer", run)
    settings = saved.planning.settings if saved.planning is not None else None
    for key, machine in entries_of(request.machines).items():
        name = machine.name
        if settings is not None and all(name not in member.machines for member in settings.members):
            yield MachineChange(f"out:{key}", name, "nothing: it is not part of the chosen strategy", "~")
        elif not machine.is_local:
            folder = machine.project_path or "~/.cache/muster"
            yield copying.change(key, name, folder)
            yield MachineChange(f"run:{key}", name, f"this run's folder in {folder}; 'machines clean' removes it")
            yield MachineChange(f"awake:{key}", name, "is kept awake while it trains", "~")


def coordinator_place(saved: Saving) -> str:
    """Return the machine of the coordinator; this computer unless the plan names one of the others."""
    settings = saved.planning.settings if saved.planning is not None else None
    others = [machine.name for machine in saved.hosts.machines if not machine.is_local]
    return settings.coordinator if settings is not None and settings.coordinator in others else "this computer"


def _network(far: bool, profile: Profile, engine: str, coordinator: str) -> Iterator[str]:
    """Yield the connections between machines, for users with a firewall; ``engine`` is empty for a single machine."""
    if far:
        yield "SSH from this computer to each machine"
    if engine == "mesh":
        port = f" (port {profile.strategy.coordinator_port})" if profile.strategy.coordinator_port else ""
        yield f"the machines also connect to {coordinator}{port} and to each other, on free ports"
        yield f"if a firewall blocks that, {coordinator} relays"
    elif engine:
        yield "the machines also connect to each other, on free ports"
