"""Options as environment variables: ``MUSTER_LEARNING_RATE=1e-4``, ``MUSTER_DILOCO_SYNC_INTERVAL=50``.

They stand above all files and below the command line. Other variables of this prefix are not options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from profiles.files.layers import VARIABLE, Layer, Setting, SettingOrigin
from profiles.files.library import SELECTORS
from profiles.options import options

PREFIX = "MUSTER_"


def variable_of(option: str) -> str:
    """Return the variable of an option: ``diloco.sync_interval`` is ``MUSTER_DILOCO_SYNC_INTERVAL``."""
    return PREFIX + option.replace(".", "_").upper()


def options_of_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the options and references that variables set, as they are written; an empty variable sets nothing."""
    written = {name: value.strip() for name, value in variables.items() if name.startswith(PREFIX) and value.strip()}
    if not written:
        return {}
    keys = [key for spec in options() for key in (spec.name, spec.alias) if key]
    return {key: written[variable_of(key)] for key in (*SELECTORS, *keys) if variable_of(key) in written}


def environment_layer(variables: Mapping[str, str] = os.environ) -> Layer:
    """Return the variables as a layer of a profile."""
    settings = options_of_environment(variables)
    return {key: Setting(value, SettingOrigin(VARIABLE + variable_of(key)), key) for key, value in settings.items()}
