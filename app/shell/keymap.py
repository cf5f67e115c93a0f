"""User-defined keys: ``~/.config/muster/keys.ini``, read when a screen starts and validated as a whole.

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

_SECTION = "keys"
_NAMED = frozenset((*NAMES, *(key.value for key in Keys)))


def keymap_file() -> Path:
    """Return the path of the user's key file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "muster" / "keys.ini"


def read_keymap(path: Path | None = None) -> dict[str, str]:
    """Return the chosen keys by action in the form of Textual's keymap (separated by commas); empty without a file.

    Raises:
        BadInput: an unknown action or key, or two actions of one screen with the same key.
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
    if unknown_sections := {*reader.sections(), *(["DEFAULT"] if reader.defaults() else ())} - {_SECTION}:
        raise BadInput(f"{path}: there is no section [{min(unknown_sections)}]", f"write [{_SECTION}] above the lines")
    actions = known_actions()
    chosen = {}
    for action, keys in reader[_SECTION].items() if _SECTION in reader else ():
        if action not in actions:
            from profiles.options import hint_for  # pydantic, which the first paint does without

            hint = hint_for(action, actions, f"there are: {', '.join(sorted(actions))}")
            raise BadInput(f"{path}: there is no action '{action}'", hint)
        chosen[action] = ",".join(_key(word.strip(), action, path) for word in " ".join(keys.split()).split(","))
    _check_conflicts(chosen, path)
    return chosen


def _key(word: str, action: str, path: Path) -> str:
    is_named = word in _NAMED or word.rpartition("+")[2] in _NAMED or key_to_character(word) is not None
    is_character = len(word) == 1 and word.isprintable()
    # Textual also accepts names of signs in capitals, but no key press ever matches them.
    if not is_character and not (is_named and word == word.lower()):
        hint = "write a sign, or a name such as slash, space, f5, ctrl+n"
        raise BadInput(f"{path}: {action} = {word}: there is no such key", hint)
    return word


def known_actions() -> set[str]:
    """Return the actions whose keys can be changed, of all loaded screens."""
    return {binding.id for kind in screens() for binding in bindings_of(kind) if binding.id}


def screens() -> Iterator[type[BaseScreen]]:
    """Yield every loaded screen class."""
    kinds = [BaseScreen]
    for kind in kinds:
        kinds += kind.__subclasses__()
        yield kind


def bindings_of(kind: type[BaseScreen]) -> list[Binding]:
    """Return the bindings of a screen class, of its bases, and of every application."""
    inherited = [binding for base in kind.__mro__ for binding in base.__dict__.get("BINDINGS", ())]
    return [binding for binding in (*bindings(OF_APPS), *inherited) if isinstance(binding, Binding)]


def _keys(words: str) -> Iterable[str]:
    """Return the keys under their canonical names."""
    return BindingsMap([Binding(words, "")]).key_to_bindings


def _check_conflicts(chosen: Mapping[str, str], path: Path) -> None:
    for kind in screens():
        binding_by_key: dict[str, Binding] = {}
        for binding in bindings_of(kind):
            for key in _keys(chosen.get(binding.id or "", binding.key)):
                earlier = binding_by_key.setdefault(key, binding)
                if earlier.action != binding.action and {binding.id, earlier.id} & chosen.keys():
                    hint = f"give one of '{earlier.action}' and '{binding.action}' another key"
                    raise BadInput(f"{path}: two actions of {kind.HEADING or 'a screen'} have the key {key}", hint)
