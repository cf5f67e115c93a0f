"""Which settings of a profile may follow the memory of the machines: those that its person has left open."""

from __future__ import annotations

from profiles.layers import Merged, Setting
from profiles.schema import FITTED, Profile

_NOBODY, _PROFILE, _COMMAND = range(3)
"""Who has said something: a group, model or data set that is shared; a profile; the person who starts it."""
_WITH = {"batch_size": ("batch_size", "gradient_accumulation")}
"""Options that are one choice."""


def left_open(merged: Merged) -> str:
    """Return the settings that may follow the memory, as ``fit_memory`` has them; ``off`` for none.

    Who names them there opens what stands in the same file, or before it in the order of the layers.
    """
    said = merged.settings.get("fit_memory")
    wanted = said.value if said is not None else "auto"
    if wanted.strip() == "off":
        return "off"
    parts = FITTED if wanted.strip() == "auto" else tuple(part.strip() for part in wanted.split(","))
    names = [name for name in FITTED if name in parts]
    last = _who(said) if said is not None and wanted.strip() != "auto" else _NOBODY
    found = [
        name for name in names if all(_who(merged.settings.get(option)) <= last for option in _WITH.get(name, (name,)))
    ]
    return ", ".join(found) or "off"


def _who(setting: Setting | None) -> int:
    if setting is None:
        return _NOBODY
    if setting.origin.file is None:
        return _COMMAND
    return _PROFILE if setting.origin.section.startswith(("profile:", "distributed:")) else _NOBODY


def open_settings(profile: Profile) -> frozenset[str]:
    """Return the settings of a profile that may be changed; of one that was made without files: those not given."""
    wanted = profile.run.fit_memory
    if wanted == "auto":
        given = set.union(
            *(set(part.model_fields_set) for part in (profile.model, profile.training, profile.evaluation))
        )
        return frozenset(name for name in FITTED if not given & set(_WITH.get(name, (name,))))
    return frozenset() if wanted == "off" else frozenset(part.strip() for part in wanted.split(","))
