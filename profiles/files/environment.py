"""Options as environment variables: ``MUSTER_LEARNING_RATE=1e-4``, ``MUSTER_DILOCO_SYNC_INTERVAL=50``.

They stand above all files and below the command line. Other variables of this prefix are not options; one that looks
like a misspelt option is named.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from profiles.files.layers import VARIABLE, Layer, Setting, SettingOrigin
from profiles.files.library import SELECTORS
from profiles.options import options
from profiles.other_names import HINTS

PREFIX = "MUSTER_"
_ALIKE = 0.9
"""Likeness, prefix included, from which a name is a misspelt option: ``MUSTER_RUN_ID`` and other programs' are not."""


def variable_of(option: str) -> str:
    """Return the variable of an option: ``diloco.sync_interval`` is ``MUSTER_DILOCO_SYNC_INTERVAL``."""
    return PREFIX + option.replace(".", "_").upper()


def options_of_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the options and references that variables set, as they are written; an empty variable sets nothing."""
    written = {name: value.strip() for name, value in variables.items() if name.startswith(PREFIX) and value.strip()}
    if not written:
        return {}
    return {key: written[variable_of(key)] for key in _keys() if variable_of(key) in written}


def misspelt_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return hints by variable, of those that set nothing but look as if they should: near an option's, or the habit of
    another program."""
    written = [name for name, value in variables.items() if name.startswith(PREFIX) and value.strip()]
    known = {variable_of(key) for key in _keys()} if written else set()
    hints: dict[str, str] = {}
    for name in (name for name in written if name not in known):
        meant = difflib.get_close_matches(name.upper(), known, 1, _ALIKE)
        hint = f"did you mean {meant[0]}?" if meant else HINTS.get(name.removeprefix(PREFIX).lower(), "")
        hints |= {name: hint} if hint else {}
    return hints


def _keys() -> tuple[str, ...]:
    return (*SELECTORS, *(key for spec in options() for key in (spec.name, spec.alias) if key))


def environment_layer(variables: Mapping[str, str] = os.environ) -> Layer:
    """Return the variables as a layer of a profile."""
    settings = options_of_environment(variables)
    return {key: Setting(value, SettingOrigin(VARIABLE + variable_of(key)), key) for key, value in settings.items()}
