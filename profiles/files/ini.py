"""INI files: parsed with the line of every value, and edited without touching anything else.

The syntax is a subset of :mod:`configparser`'s: ``[section]``, ``key = value`` (or ``key: value``), comments on their
own line after ``#`` or ``;`` and behind a value after `` #``. A value is one line; a section or a key stands once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from profiles.errors import BadInput

_HEADING = re.compile(r"\[(?P<name>[^\[\]]+)\]\s*(?:[#;].*)?")
_ENTRY = re.compile(r"(?P<key>[^\s=:\[][^=:]*?)\s*[=:]\s*(?P<value>.*)")
_COMMENT_BEHIND = re.compile(r"(?:^|\s+)#.*$")


@dataclass(frozen=True)
class Entry:
    """One ``key = value``."""

    value: str
    line: int
    """Counted from 1."""


@dataclass
class IniSection:
    """One ``[section]``."""

    name: str
    line: int
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass
class IniFile:
    """A parsed file; sections and entries in the order of the file."""

    path: Path
    sections: dict[str, IniSection] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The path as typed from the current folder."""
        return label_of(self.path)


def label_of(path: Path) -> str:
    """Return ``path`` relative to the current folder if it is inside, else unchanged."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def read_ini(path: Path) -> IniFile:
    """Read and parse a file.

    Raises:
        BadInput: missing, unreadable, not UTF-8, or not an INI file; names the line.
    """
    return parse_ini(read_text(path), path)


def read_text(path: Path) -> str:
    """Return the text of a file with its line ends preserved.

    Raises:
        BadInput: missing, unreadable, or not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise BadInput(f"{label_of(path)}: {error.strerror}", "name an INI file that can be read") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{label_of(path)}: not UTF-8 text", "save the file as UTF-8") from error


def parse_ini(text: str, path: Path) -> IniFile:
    """Parse ``text``; ``path`` is for messages and relative paths.

    Raises:
        BadInput: a line that is no heading, entry or comment, or a duplicate section or key.
    """
    file = IniFile(path)
    current: IniSection | None = None
    for number, raw in enumerate(split_lines(text), start=1):
        line = raw.strip().removeprefix("\ufeff")
        if not line or line[0] in "#;":
            continue
        if line[0] == "[":
            current = _begin_section(file, line, number)
        else:
            _add_entry(file, current, line, number)
    return file


def split_lines(text: str) -> list[str]:
    """Return the lines with their ends; only LF, CRLF and CR end a line."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", text)


def _begin_section(file: IniFile, line: str, number: int) -> IniSection:
    match = _HEADING.fullmatch(line)
    name = ":".join(part.strip() for part in match["name"].split(":", 1)) if match else ""
    if not name:
        raise BadInput(
            f"{file.label} line {number}: '{line}' is not a section", "write [kind:name], like [profile:demo]"
        )
    if name in file.sections:
        earlier_line = file.sections[name].line
        raise BadInput(f"{file.label} line {number}: [{name}] is there already, on line {earlier_line}", "join the two")
    section = file.sections[name] = IniSection(name, number)
    return section


def _add_entry(file: IniFile, section: IniSection | None, line: str, number: int) -> None:
    match = _ENTRY.fullmatch(line)
    if not match:
        raise BadInput(f"{file.label} line {number}: '{line[:60]}' is not 'key = value'", "comments begin with #")
    if section is None:
        raise BadInput(f"{file.label} line {number}: '{match['key']}' stands before any [section]", "move it into one")
    if match["key"] in section.entries:
        earlier_line = section.entries[match["key"]].line
        message = (
            f"{file.label} line {number} [{section.name}]: '{match['key']}' is set already, on line {earlier_line}"
        )
        raise BadInput(message, "keep one of the two")
    section.entries[match["key"]] = Entry(_COMMENT_BEHIND.sub("", match["value"]).rstrip(), number)


def with_section(text: str, name: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with section ``name`` holding exactly ``values``.

    Everything outside the section is preserved byte for byte; inside it, comments (also behind a value), order and
    the spelling of keys. New entries follow the last old one; a new section is appended at the end.
    """
    lines = split_lines(text)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    section = parse_ini(text, Path()).sections.get(name)
    if section is None:
        before = text + (end if text and not text.endswith(("\n", "\r")) else "") + (end if text else "")
        return before + f"[{name}]{end}" + "".join(f"{key} = {value}{end}" for key, value in values.items())
    entry_at = {entry.line: (key, entry.value) for key, entry in section.entries.items()}
    last_line = max(entry_at, default=section.line)
    output = lines[: section.line]
    for number in range(section.line + 1, last_line + 1):
        key, old = entry_at.get(number, ("", ""))
        if not key or values.get(key) == old:
            output.append(lines[number - 1])
        elif key in values:
            output.append(_with_value(lines[number - 1].rstrip("\r\n"), values[key]) + end)
    if not output[-1].endswith(("\n", "\r")):
        output[-1] += end
    output += [f"{key} = {value}{end}" for key, value in values.items() if key not in section.entries]
    return "".join(output + lines[last_line:])


def _with_value(line: str, value: str) -> str:
    """Return the line of an entry with another value, and the comment behind it."""
    entry = re.match(r"\s*[^=:]*[=:]\s*", line)
    assert entry is not None
    comment = _COMMENT_BEHIND.search(line[entry.end() :])
    behind = comment[0] if comment else ""
    return entry[0] + value + (f"  {behind}" if behind.startswith("#") else behind)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file atomically: it holds the old or the new text, never a part.

    Raises:
        BadInput: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as stream:
            stream.write(text.encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise BadInput(f"{label_of(path)}: {error.strerror}", "choose a folder that can be written") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
