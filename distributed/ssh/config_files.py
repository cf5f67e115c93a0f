"""Files of OpenSSH's client configuration: what they say, and whether a person stands behind them.

``ssh -G`` runs the commands of a configuration (``Match exec``), and a connection runs more of them. The person's own
~/.ssh/config is theirs; a hosts file may name another one, and may come from somebody else. So such a configuration is
only used after :func:`accept`, or where exactly its content was accepted before.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from profiles.errors import BadInput
from training.approvals import approve, digest_of, has_changed, is_approved

USER_CONFIG = Path("~/.ssh/config")
_MOST_FILES = 256
_LARGEST_FILE = 4 * 1024 * 1024
_COMMANDS = ("proxycommand", "localcommand", "knownhostscommand", "pkcs11provider", "securitykeyprovider")
"""Settings that start a program or load a library; ``Match`` does where it says ``exec``."""

_accepted: set[str] = set()
"""Configurations that may be used until this process ends."""


def config_lines(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the lines of a configuration and of all that it includes, as words, each with its file.

    A file without any line, or that cannot be read, is yielded once without words.
    """
    yield from _lines(path, set())


def _lines(path: Path, read: set[Path]) -> Iterator[tuple[Path, list[str]]]:
    if path in read or len(read) >= _MOST_FILES:
        return
    read.add(path)
    yield path, []
    for line in read_lines(path):
        words = _words(line)
        if not words:
            continue
        yield path, words
        if words[0].lower() == "include":
            for pattern in words[1:]:
                base = Path("~/.ssh").expanduser()
                for name in sorted(glob.glob(str(base / Path(os.path.expandvars(pattern)).expanduser()))):
                    yield from _lines(Path(name), read)


def _words(line: str) -> list[str]:
    """Split ``Key value value`` or ``Key=value``; quotes hold words together."""
    try:
        words = shlex.split(line, comments=True, posix=True)
    except ValueError:
        words = line.split()
    if words and "=" in words[0]:
        key, _, rest = words[0].partition("=")
        words = [key, *([rest] if rest else []), *words[1:]]
    elif len(words) > 1 and words[1] == "=":
        del words[1]
    return words


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of a sensible size; none where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(_LARGEST_FILE).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def commands_in(config: str) -> list[str]:
    """Return the lines of a configuration that start a program, with their files."""
    found = []
    for path, words in config_lines(_path(config)):
        key = words[0].lower() if words else ""
        runs = key in _COMMANDS or (key == "match" and any("exec" in word.lower() for word in words))
        if runs and words[1:] != ["none"]:
            found.append(f"{' '.join(words)} ({path})")
    return found


def accept(config: str) -> None:
    """Use a configuration from now on: a person has named the hosts file that names it, or agreed to its content."""
    if config and not _own(config):
        approve(_digest(config), _what(config))
        _accepted.add(str(_path(config)))


def accepted(config: str) -> bool:
    """Whether a configuration may be used: the person's own, and one that was accepted with the content it has.

    Once used it may be used until this process ends, so that a run that goes on does not stop at a change.
    """
    if not config or str(_path(config)) in _accepted or _own(config):
        return True
    if is_approved(_digest(config)):
        _accepted.add(str(_path(config)))
        return True
    return False


def check_accepted(config: str, who: str) -> None:
    """Refuse a configuration that nobody stands behind, before anything of it is run.

    Raises:
        BadInput: it was not accepted; ``who`` is the machine that it is to be used for.
    """
    if not accepted(config):
        message = f"{who}: the SSH configuration {_path(config)} of its hosts file is not approved"
        raise BadInput(message, "it can run commands here: read it, then approve it: access --hosts FILE")


def accepted_before(config: str) -> bool:
    """Whether a configuration that is not accepted was, with another content."""
    return not accepted(config) and has_changed(_what(config))


def _what(config: str) -> str:
    return f"SSH configuration {_path(config)}"


def _path(config: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(config)))


def _own(config: str) -> bool:
    return os.path.realpath(_path(config)) == os.path.realpath(USER_CONFIG.expanduser())


def _digest(config: str) -> str:
    files = [path for path, _ in config_lines(_path(config))]
    return digest_of("ssh_config", files)
