"""Trackers that a run's events can be sent to: the option ``trackers``."""

from __future__ import annotations

from profiles.declarations import OptionError

TRACKERS = ("csv", "tensorboard", "wandb", "trackio")
"""Known names."""


def tracker_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once.

    Raises:
        OptionError: one of them is unknown.
    """
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise OptionError("trackers", f"'{name}' is none of {', '.join(TRACKERS)}")
    return names
