"""Tasks by name: every file of ``kinds`` registers one. Its code is imported when it is made: all take seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profiles.declarations import Section, Trait, declare, import_all, owners, withdraw
from profiles.errors import BadInput
from profiles.schema import Profile
from training.tasks.base import Task

_known: dict[str, Callable[[Profile], Task]] = {}


def register(
    name: str,
    summary: str,
    make: Callable[[Profile], Task],
    options: type[Section] = Section,
    trait: Trait | None = None,
) -> None:
    """Make a task known.

    Args:
        name: in settings.
        summary: what it trains, in one line.
        make: makes it, not yet prepared; raises ``BadInput`` where its model cannot be used.
        options: of its own, called ``name.option`` in settings; ``profile.model.of(options)`` gives their values.
        trait: what whoever prepares, measures or shows a run of it has to know.

    Raises:
        ValueError: the name is taken.
    """
    declare("model", name, summary, options, trait=trait)
    _known[name] = make


def forget(name: str) -> None:
    """Take a task out again."""
    del _known[name]
    withdraw("model", name)


def load() -> None:
    """Import every file of ``kinds``.

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
    if kind not in _known:
        raise BadInput(f"there is no task {kind!r}", f"choose one of {', '.join(owners('model'))}")
    return _known[kind](profile)
