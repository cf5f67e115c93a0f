"""Tasks by name: every module of ``kinds`` registers one. A task's code is imported on use, as that takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profiles.declarations import Section, Trait, declare, import_all, owners, withdraw
from profiles.errors import BadInput
from profiles.schema import Profile
from training.tasks.base import Task

_factories: dict[str, Callable[[Profile], Task]] = {}


def register(
    name: str,
    summary: str,
    make: Callable[[Profile], Task],
    options: type[Section] = Section,
    trait: Trait | None = None,
) -> None:
    """Register a task.

    Args:
        name: name in settings.
        summary: what it trains, in one line.
        make: creates the task, unprepared; raises ``BadInput`` if its model cannot be used.
        options: its own options, ``name.option`` in settings; ``profile.model.of(options)`` returns their values.
        trait: property by which other code adapts the preparation, measurement and display of its runs.

    Raises:
        ValueError: the name is taken.
    """
    declare("model", name, summary, options, trait=trait)
    _factories[name] = make


def forget(name: str) -> None:
    """Unregister a task."""
    del _factories[name]
    withdraw("model", name)


def load() -> None:
    """Import every module of ``kinds``.

    Raises:
        BadInput: one of them cannot be imported.
    """
    import_all(Path(__file__).parent / "kinds", f"{__package__}.kinds")


def task_from_profile(profile: Profile) -> Task:
    """Return the task a profile names, not yet prepared.

    Raises:
        BadInput: there is no such task, or its model cannot be used.
    """
    load()
    kind = profile.model.task
    if kind not in _factories:
        raise BadInput(f"there is no task {kind!r}", f"choose one of {', '.join(owners('model'))}")
    return _factories[kind](profile)
