"""Profiles with the machines that they bring along, read from the INI files without resolving them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from app.wizard.records import KnownProfile
from profiles.errors import BadInput
from profiles.library import Library
from profiles.locations import absolute_path
from profiles.resolve import ProfileEntry, list_profiles


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


def known_profiles(config: Path | None = None) -> tuple[KnownProfile, ...]:
    """Return all profiles: the saved ones, newest first, then those of ``config.ini`` in its order.

    Raises:
        BadInput: ``config.ini`` cannot be read.
    """
    library, hosts = Library.open(config), saved_hosts(config)
    found = [_known(entry, library, hosts.get(entry.name)) for entry in list_profiles(config)]
    return tuple(sorted(found, key=lambda one: -one.entry.source.stat().st_mtime if one.saved else 1.0))


def _known(entry: ProfileEntry, library: Library, hosts: Path | None) -> KnownProfile:
    from distributed.hosts.file import load_hosts  # pydantic's models; what lists no saved profile does without

    saved = entry.source != library.config.path
    try:
        return KnownProfile(entry, saved, load_hosts(hosts).machines if hosts is not None else ())
    except BadInput as error:
        return KnownProfile(replace(entry, error=str(error)), saved)
