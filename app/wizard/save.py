"""What the set-up writes when its Plan is confirmed: the profile, its machines, and the plan, side by side.

``profiles/saved/NAME.ini`` runs by its name. ``NAME.hosts.json`` beside it names the machines, ``NAME.plan.json`` holds
the way that was chosen; ``distributed-train NAME --plan NAME.plan.json`` carries just that out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from app.console import command_line
from app.wizard.forecasting import Forecast
from app.wizard.job_view import WAYS, resolved
from app.wizard.machines import hosts_of
from app.wizard.state import Request
from distributed.hosts.file import Hosts, dump_hosts, load_hosts, save_hosts
from distributed.planning.document import Planning
from profiles.errors import BadInput
from profiles.layers import DEFAULT
from profiles.library import Library, check_name, saved_folder
from profiles.options import as_text, options_by_name
from profiles.resolve import load_profile
from profiles.saved import save_profile
from profiles.schema import FITTED, Profile
from training.strategies.registry import interval_options

_NOT_KEPT = ("hosts", "workers", "shares")
_REFERENCES = ("model", "dataset")
_FITTED = frozenset((*FITTED, "gradient_accumulation"))


@dataclass(frozen=True)
class Saving:
    """What would be written, and where."""

    name: str
    values: Mapping[str, str]
    """Options and references of the profile."""
    hosts: Hosts
    planning: Planning | None
    """``None`` where there is nothing to choose: one machine."""
    ini: Path
    hosts_file: Path
    plan_file: Path

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.ini, self.hosts_file, *((self.plan_file,) if self.planning is not None else ()))

    @property
    def command(self) -> str:
        """What to type for just this run, once it is saved."""
        plan = ["--plan", shown(self.plan_file)] if self.planning is not None else []
        return command_line("distributed-train", self.name, *plan)

    def write(self, config: Path | None) -> tuple[str, ...]:
        """Write all files, each whole; the profile is the last one, so that it never names what is not there.

        Raises:
            BadInput: a name that is taken, or a folder that cannot be written.
        """
        check_name(self.name)
        self.ini.parent.mkdir(parents=True, exist_ok=True)
        fresh = [path for path in (self.hosts_file, self.plan_file) if not path.exists()]
        try:
            save_hosts(self.hosts, self.hosts_file)
            if self.planning is not None:
                self.planning.write(self.plan_file)
            save_profile(self.name, self.values, config)
        except BaseException:
            for path in fresh:
                with suppress(OSError):
                    path.unlink()
            raise
        return tuple(shown(path) for path in self.files)


def shown(path: Path) -> str:
    """A path as one would type it here."""
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def saving(request: Request, config: Path | None = None) -> Saving:
    """Return what confirming would write; the plan holds the chosen way, of two machines or more.

    Raises:
        BadInput: the profile cannot be used, or the name cannot be a profile's.
    """
    found = request.planning if len(request.machines) > 1 else None
    planning = found.planning_of(request.chosen) if isinstance(found, Forecast) else None
    library = Library.open(config)
    folder = saved_folder(library.config.path.resolve())
    hosts = hosts_of(request.machines)
    values = _values(request, planning, library, config)
    name = request.save_as or _free_name(request, values, hosts, library, folder)
    check_name(name)
    hosts_file = folder / f"{name}.hosts.json"
    return Saving(
        name, {**values, "hosts": str(hosts_file)}, hosts, planning, folder / f"{name}.ini", hosts_file,
        folder / f"{name}.plan.json",
    )  # fmt: skip


def _values(request: Request, planning: Planning | None, library: Library, config: Path | None) -> dict[str, str]:
    """Return every option that anybody has set, so that the profile stands by itself.

    How the members work together stays ``auto`` where the recommended way was taken: another day, other figures.
    """
    found = resolved(request.job, config)
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
    if _FITTED & values.keys():  # what was left open stays so, though its value is in the file now
        values["fit_memory"] = found.value("fit_memory")
    if planning is not None and not _is_recommended(request) and planning.settings is not None:
        chosen = planning.settings.options
        values |= {name: as_text(chosen[name]) for name in (*WAYS, *interval_options()) if name in chosen}
    return values


def _is_recommended(request: Request) -> bool:
    chosen = request.chosen
    return chosen is None or (chosen.recommended and chosen.interval == chosen.best_interval)


def _free_name(request: Request, values: Mapping[str, str], hosts: Hosts, library: Library, folder: Path) -> str:
    """Return the saved profile's own name, or a name that nobody has, or that has just these choices."""
    base = request.job.profile
    known = library.find("profile", base)
    if known is not None and known.file.path != library.config.path:
        return base
    members = len(hosts.machines)
    stem = f"{base}-here" if members == 1 and hosts.machines[0].here else f"{base}-{members}-machines"
    taken = {name.casefold() for name in library.names("profile")} | {path.stem.casefold() for path in library.broken}
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(
        name for name in names if name.casefold() not in taken or _is_the_same(name, values, hosts, library, folder)
    )


def _is_the_same(name: str, values: Mapping[str, str], hosts: Hosts, library: Library, folder: Path) -> bool:
    found = library.find("profile", name)
    if found is None or found.file.path.parent != folder:
        return False
    try:
        before = load_profile(name, {}, library.config.path).profile
        wanted = load_profile(name, {**values, "hosts": before.run.hosts}, library.config.path).profile
        keys = found.section.entries.keys() - {"description", "hosts"}
        return (
            keys == values.keys()
            and before == wanted
            and dump_hosts(load_hosts(Path(before.run.hosts))) == dump_hosts(hosts)
        )
    except BadInput:
        return False


def as_saved(profile: Profile, kept: Saving) -> Profile:
    """Return the profile as it will be read from its file: references that are paths are options there."""
    names = {f"{kind}_name": kept.values.get(kind, "") for kind in _REFERENCES}
    return profile.model_copy(update={"name": kept.name, **names})
