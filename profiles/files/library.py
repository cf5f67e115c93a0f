"""The INI files that profiles are assembled from: ``config.ini`` and the saved profiles next to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from profiles.errors import BadInput
from profiles.files.ini import IniFile, IniSection, read_ini
from profiles.installation import SHARED, saved_profiles
from profiles.options import canonical, hint_for, options, options_by_name
from profiles.other_names import HINTS

CONFIG = SHARED / "config.ini"
"""The shipped ``config.ini``."""

REFERENCES: dict[str, frozenset[str]] = {
    "DEFAULT": frozenset({"group", "model", "dataset"}),
    "dataset_defaults": frozenset(),
    "group": frozenset({"description"}),
    "model": frozenset({"group", "description"}),
    "dataset": frozenset({"description"}),
    "profile": frozenset({"group", "model", "dataset", "description", "stand_in"}),
    "distributed": frozenset({"description"}),
}
"""Keys other than options that each kind of section may hold."""
SELECTORS = REFERENCES["DEFAULT"]
"""References that select sections: ``group``, ``model``, ``dataset``."""
_WITHOUT_NAME = ("DEFAULT", "dataset_defaults")
_PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid profile name: it becomes part of file names.

    Raises:
        BadInput: it is not.
    """
    if not _PROFILE_NAME.fullmatch(name):
        hint = "begin with a letter or digit; then letters, digits, '.', '_' and '-', at most 64 in all"
        raise BadInput(f"'{name}' cannot be the name of a profile", hint)
    return name


def saved_folder(config: Path) -> Path:
    """Return the folder of the saved profiles that belong to ``config``."""
    return saved_profiles(config)


@dataclass(frozen=True)
class FoundSection:
    """A section and the file it stands in."""

    file: IniFile
    section: IniSection


@dataclass
class Library:
    """``config.ini`` and the saved profiles; for a saved file that cannot be read, its error."""

    config: IniFile
    saved: list[IniFile] = field(default_factory=list)
    broken: dict[Path, BadInput] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Path | None = None) -> Library:
        """Read all files.

        Raises:
            BadInput: ``config`` cannot be read or holds a section that does not exist.
        """
        main = read_ini(config or CONFIG)
        check_headings(main, saved=False)
        library = cls(main)
        for path in sorted(saved_folder(main.path).glob("*.ini")):
            try:
                file = read_ini(path)
                check_headings(file, saved=True)
                library.saved.append(file)
            except BadInput as error:
                library.broken[path] = error
        return library

    def find(self, kind: str, name: str = "") -> FoundSection | None:
        """Return the section ``[kind:name]``, or ``[kind]`` without a name.

        Raises:
            BadInput: two files have it.
        """
        heading = f"{kind}:{name}" if name else kind
        matches = [FoundSection(file, file.sections[heading]) for file in self.files() if heading in file.sections]
        if len(matches) > 1:
            raise BadInput(
                f"[{heading}] is in {matches[0].file.label} and in {matches[1].file.label}", "rename one of them"
            )
        return matches[0] if matches else None

    def files(self) -> Iterator[IniFile]:
        """Yield ``config.ini``, then the saved profiles."""
        yield self.config
        yield from self.saved

    def names(self, kind: str) -> list[str]:
        """Return the names of all sections of a kind, in order, each once."""
        headings = (heading for file in self.files() for heading in file.sections)
        return list(dict.fromkeys(heading.split(":", 1)[1] for heading in headings if heading.startswith(f"{kind}:")))


def check_headings(file: IniFile, saved: bool) -> None:
    """Check the headings of a file.

    Raises:
        BadInput: an unknown kind, a missing or superfluous name, a ``[distributed:NAME]`` without its profile.
    """
    for heading, section in file.sections.items():
        position = f"{file.label} line {section.line}"
        kind, _, name = heading.partition(":")
        if kind not in REFERENCES:
            shapes = [f"[{kind}]" if kind in _WITHOUT_NAME else f"[{kind}:NAME]" for kind in REFERENCES]
            suggestion = hint_for(kind, REFERENCES, "").replace("'?", heading[len(kind) :] + "'?")
            raise BadInput(f"{position}: unknown section [{heading}]", suggestion or f"known: {', '.join(shapes)}")
        if bool(name) == (kind in _WITHOUT_NAME):
            raise BadInput(f"{position}: [{heading}]", f"write [{kind}]" if name else f"write [{kind}:NAME]")
        if saved and kind in _WITHOUT_NAME:
            raise BadInput(f"{position}: [{heading}] is for config.ini only", "move its options into [profile:NAME]")
        if kind == "profile":
            check_name(name)
        if kind == "distributed" and f"profile:{name}" not in file.sections:
            profiles = [title.partition(":")[2] for title in file.sections if title.startswith("profile:")]
            hint = hint_for(name, profiles, "remove it, or add the profile")
            raise BadInput(f"{position}: [{heading}] has no [profile:{name}] in this file", hint)


def check_keys(located: FoundSection) -> None:
    """Check that every key of a section is allowed there.

    Raises:
        BadInput: one is not; names the line and the nearest valid key.
    """
    kind = located.section.name.partition(":")[0]
    for key, entry in located.section.entries.items():
        position = f"{located.file.label} line {entry.line} [{located.section.name}]"
        name = canonical(key)
        if name in options_by_name() or key in REFERENCES[kind]:
            if name != key and name in located.section.entries:
                raise BadInput(f"{position}: '{key}' and '{name}' are one option", "set it once")
            continue
        if key in REFERENCES["profile"]:
            raise BadInput(f"{position}: '{key}' cannot be set here", "set it in [profile:NAME]")
        raise BadInput(f"{position}: unknown option '{key}'", unknown_option_hint(key, REFERENCES[kind]))


def unknown_option_hint(key: str, references: frozenset[str]) -> str:
    """Return the hint for an option that does not exist."""
    if (hint := HINTS.get(key.casefold())) is not None:
        return hint
    aliases = [spec.alias for spec in options() if spec.alias]  # before the names that end alike
    return hint_for(key, [*aliases, *options_by_name(), *references], "docs/reference/options.md lists all options")
