"""Tasks by name, registered by the modules of ``kinds`` and of plug-ins (entry points ``muster.tasks``).

A task's code is imported on use, as that takes seconds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path

from profiles.declarations import Section, Trait, declare, import_all, owners, withdraw
from profiles.errors import BadInput
from profiles.installation import load_plugin, plugins
from profiles.schema import Profile
from training.tasks.base import Task
from training.tasks.inputs.base import TaskInputs
from training.tasks.inputs.model_size import ModelSize

ENTRY_POINTS = "muster.tasks"
"""The group in which a package names modules that register tasks."""
_factories: dict[str, Callable[[Profile], Task]] = {}
_inputs: dict[str, Callable[[], TaskInputs]] = {}
_modules: dict[str, str] = {}


def register(
    name: str,
    summary: str,
    make: Callable[[Profile], Task],
    options: type[Section] = Section,
    trait: Trait | None = None,
    inputs: Callable[[], TaskInputs] = TaskInputs,
    module: str = "",
) -> None:
    """Register a task.

    Args:
        name: name in settings.
        summary: what it trains, in one line.
        make: creates the task, unprepared; raises ``BadInput`` if its model cannot be used.
        options: its own options, ``name.option`` in settings; ``profile.model.of(options)`` returns their values.
        trait: property by which other code adapts the preparation, measurement and display of its runs.
        inputs: returns what programs that do not train know of its data and model; called when it is first needed.
        module: with the code that ``make`` imports, for who imports it before the files of the model are there.

    Raises:
        ValueError: the name is taken.
    """
    declare("model", name, summary, options, trait=trait)
    _factories[name], _inputs[name], _modules[name] = make, functools.cache(inputs), module


def forget(name: str) -> None:
    """Unregister a task."""
    del _factories[name], _inputs[name], _modules[name]
    withdraw("model", name)


def load() -> None:
    """Import every module that registers tasks.

    Raises:
        BadInput: one of them cannot be imported.
    """
    import_all(Path(__file__).parent / "kinds", f"{__package__}.kinds")
    for point in plugins(ENTRY_POINTS):
        load_plugin(point)


def import_code(task: str) -> None:
    """Import the code of a task, which takes seconds and needs no file of its model or data; of an unknown task, none.

    Raises:
        BadInput: a module that registers tasks cannot be imported.
        ImportError: the machine lacks a package.
    """
    load()
    if module := _modules.get(task):
        importlib.import_module(module)


def inputs_of(task: str) -> TaskInputs:
    """Return what the runs of a task need; of an unknown task, nothing that is known beforehand."""
    load()
    return _inputs.get(task, TaskInputs)()


def size_for(profile: Profile) -> ModelSize | None:
    """Return the size of a profile's model from files on this machine; ``None`` if it is unknown."""
    return inputs_of(profile.model.task).model_size(profile)


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
