"""Saving a profile to ``profiles/saved/<name>.ini``, a file that can be sent to somebody and rerun by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from profiles.errors import BadInput
from profiles.ini import IniFile, parse_ini, read_text, with_section, write_atomically
from profiles.layers import COMMAND_LINE, override_layer
from profiles.library import Library, check_headings, check_name, saved_folder
from profiles.locations import absolute_location, absolute_path
from profiles.options import canonical, options_by_name
from profiles.resolve import resolve


def save_profile(name: str, values: Mapping[str, str], config: Path | None = None) -> Path:
    """Write ``[profile:name]`` so that it holds exactly ``values``, and return the file.

    Comments, other sections and every other byte of an existing file stay. Nothing is written unless the profile can
    be loaded afterwards with just these values.

    Args:
        values: options and references by name, as text; relative paths are relative to the current folder.
        config: another ``config.ini``; the profile is saved in ``profiles/saved`` beside it.

    Raises:
        BadInput: a bad name, a name taken by another file, an unknown option, a value that does not fit, or a folder
            that cannot be written.
    """
    library = Library.open(config)
    path = saved_folder(library.config.path) / f"{check_name(name)}.ini"
    override_layer(values, COMMAND_LINE)
    section = {canonical(key): _portable(library, key, value.strip(), path) for key, value in values.items()}
    for key, value in section.items():
        _check_line(key, value)
    old = read_text(path) if path.exists() else f"# A saved profile: run it by its name, {name}.\n"
    parse_ini(old, path)
    text = with_section(old, f"profile:{name}", section)
    _check_result(library, name, parse_ini(text, path))
    write_atomically(path, text)
    return path


def _check_line(key: str, value: str) -> None:
    if not value.isprintable() or " #" in value or value.startswith("#"):
        raise BadInput(f"{key} = {value!r} cannot be kept in an INI file", "one line, without ' #'")


def _portable(library: Library, key: str, value: str, path: Path) -> str:
    """Return a path so that it means the same seen from the saved file: relative within the project, else absolute."""
    spec = options_by_name().get(canonical(key))
    if not value or (spec is None and library.find(key, value)):
        return value
    if spec is not None and spec.type == "path":
        target = absolute_path(value, Path.cwd())
    elif spec is None or spec.type == "location":
        target = absolute_location(value, Path.cwd())
    else:
        return value
    root = os.path.abspath(library.config.path.parent)
    inside = target == root or target.startswith(root + os.sep)
    return os.path.relpath(target, os.path.abspath(path.parent)) if inside else target


def _check_result(library: Library, name: str, written: IniFile) -> None:
    """Check that the profile loads from ``written`` and that nothing else in it overrules the saved values."""
    path = written.path
    check_headings(written, saved=True)
    others = [file for file in library.saved if file.path != path]
    broken = {place: error for place, error in library.broken.items() if place != path}
    library = Library(library.config, [*others, written], broken)
    for other in [*library.names("profile"), *(place.stem for place in broken)]:
        if other != name and other.casefold() == name.casefold():
            raise BadInput(f"'{name}' differs from the profile '{other}' only in case", "choose another name")
    resolved = resolve(library, name, {})
    for key in map(canonical, written.sections[f"profile:{name}"].entries):
        if key in resolved.origins and resolved.origins[key].section != f"profile:{name}":
            winner = resolved.origins[key].describe(key, resolved.value(key))
            raise BadInput(f"{winner} would win over the saved value", "remove it there first")
