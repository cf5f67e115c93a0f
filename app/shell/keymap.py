"""A person's own keys: ``~/.config/muster/keys.ini``, read when a screen starts, checked whole.

::

    [keys]
    snapshot = S
    filter = f, slash
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from textual.binding import Binding, BindingsMap
from textual.keys import Keys, key_to_character

from app.shell.base_screen import BaseScreen
from app.shell.keys import NAMES, OF_APPS, bindings
from profiles.errors import BadInput
from profiles.options import hint_for

_SECTION = "keys"
_NAMED = frozenset((*NAMES, *(key.value for key in Keys)))


def keymap_file() -> Path:
    """Return where a person's keys are."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "muster" / "keys.ini"


def read_keymap(path: Path | None = None) -> dict[str, str]:
    """Return the chosen keys by action, several parted by commas, as Textual's keymap has them; none without a file.

    Raises:
        BadInput: no such action or key, or two actions of one screen with one key; one line that says which.
    """
    path = path or keymap_file()
    reader = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#", ";"))
    try:
        reader.read_string(path.read_text(encoding="utf-8-sig"), path.name)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeError, configparser.Error) as error:
        raise BadInput(
            f"{path}: {' '.join(str(error).split())}", "write [keys], then lines like: snapshot = S"
        ) from None
    if other := {*reader.sections(), *(["DEFAULT"] if reader.defaults() else ())} - {_SECTION}:
        raise BadInput(f"{path}: there is no section [{min(other)}]", f"write [{_SECTION}] above the lines")
    known = known_actions()
    chosen = {}
    for action, keys in reader[_SECTION].items() if _SECTION in reader else ():
        if action not in known:
            hint = hint_for(action, known, f"there are: {', '.join(sorted(known))}")
            raise BadInput(f"{path}: there is no action '{action}'", hint)
        chosen[action] = ",".join(_key(word.strip(), action, path) for word in " ".join(keys.split()).split(","))
    _see_that_no_two_clash(chosen, path)
    return chosen


def _key(word: str, action: str, path: Path) -> str:
    named = word in _NAMED or word.rpartition("+")[2] in _NAMED or key_to_character(word) is not None
    one = len(word) == 1 and word.isprintable()
    if not one and not (named and word == word.lower()):  # names of signs are found in capitals, too, and never pressed
        hint = "write a sign, or a name such as slash, space, f5, ctrl+n"
        raise BadInput(f"{path}: {action} = {word}: there is no such key", hint)
    return word


def known_actions() -> set[str]:
    """Return the actions that a person may give other keys, of all screens that are loaded."""
    return {one.id for kind in screens() for one in bindings_of(kind) if one.id}


def screens() -> Iterator[type[BaseScreen]]:
    """Yield every kind of screen that is loaded."""
    found = [BaseScreen]
    for kind in found:
        found += kind.__subclasses__()
        yield kind


def bindings_of(kind: type[BaseScreen]) -> list[Binding]:
    """Return the bindings of a screen, of what it is built on, and of every application."""
    declared = [*bindings(OF_APPS), *(one for base in kind.__mro__ for one in base.__dict__.get("BINDINGS", ()))]
    return [one for one in declared if isinstance(one, Binding)]


def _keys(words: str) -> Iterable[str]:
    """The same key has one name, however it is written."""
    return BindingsMap([Binding(words, "")]).key_to_bindings


def _see_that_no_two_clash(chosen: Mapping[str, str], path: Path) -> None:
    for kind in screens():
        taken: dict[str, Binding] = {}
        for one in bindings_of(kind):
            for key in _keys(chosen.get(one.id or "", one.key)):
                other = taken.setdefault(key, one)
                if other.action != one.action and {one.id, other.id} & chosen.keys():
                    hint = f"give one of '{other.action}' and '{one.action}' another key"
                    raise BadInput(f"{path}: two actions of {kind.HEADING or 'a screen'} have the key {key}", hint)
