"""Profiles with the machines that they bring along, read from the INI files without resolving them."""

from __future__ import annotations

from pathlib import Path

from app.wizard.state import Presence, ProfileRow, Status
from profiles.errors import BadInput
from profiles.library import Library
from profiles.locations import absolute_path
from profiles.resolve import list_profiles


def saved_hosts(config: Path | None = None) -> dict[str, Path]:
    """Return the hosts file of every saved profile that names one."""
    try:
        library = Library.open(config)
    except BadInput:
        return {}
    found = {}
    for file in library.saved:
        for heading, section in file.sections.items():
            kind, _, name = heading.partition(":")
            if kind == "profile" and "hosts" in section.entries and section.entries["hosts"].value:
                found[name] = Path(absolute_path(section.entries["hosts"].value, file.path.parent))
    return found


def profile_rows(config: Path | None = None) -> tuple[ProfileRow, ...]:
    """Return all profiles: the saved ones, newest first, then those of ``config.ini`` in its order.

    Raises:
        BadInput: ``config.ini`` cannot be read.
    """
    from distributed.hosts.file import load_hosts  # pydantic's models; what lists no saved profile does without

    library, hosts = Library.open(config), saved_hosts(config)
    rows = []
    for entry in list_profiles(config):
        saved = entry.source != library.config.path
        machines: tuple[Presence, ...] = ()
        if entry.name in hosts:
            try:
                machines = tuple(Presence(m.name, far=not m.here) for m in load_hosts(hosts[entry.name]).machines)
            except BadInput as error:
                entry = type(entry)(entry.name, entry.description, entry.source, f"{error.message} ({error.hint})")
        rows.append(
            ProfileRow(
                key=entry.name,
                name=entry.name,
                status=Status.FAILED if entry.error else Status.OK,
                words="cannot be used" if entry.error else f"needs a {entry.needs}" if entry.needs else "ready",
                cause=entry.error,
                description=entry.description,
                saved=saved,
                machines=machines,
                changed=entry.source.stat().st_mtime if saved else 0.0,
            )
        )
    return tuple(sorted(rows, key=lambda row: (not row.saved, -row.changed)))
