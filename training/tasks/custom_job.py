"""What a job of the user's own consists of, and how it is found.

``module:factory`` (or ``path/to/file.py:factory``) names a function that takes the profile, or nothing, and returns a
:class:`CustomJob`, a mapping with its fields, or a tuple of them in their order.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from profiles.errors import BadInput, MusterError
from profiles.schema import Profile
from training.tasks.base import SizedDataset

LossFunction = Callable[[Any, Any], torch.Tensor]
"""``loss(output, target)``: the scalar mean over the batch."""
MetricsFunction = Callable[[Any, Any], Mapping[str, float]]
"""``metrics(output, target)``: means over the batch, by name."""


@dataclass(frozen=True)
class CustomJob:
    """What a factory returns."""

    model: nn.Module
    train: SizedDataset
    validation: SizedDataset | None = None
    loss: LossFunction | None = None
    metrics: MetricsFunction | None = None
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; ``None``: torch's ``default_collate``."""
    weight: Callable[[Any], float] | None = None
    """What the loss of a batch is a mean over; ``None``: its samples. Give it for a loss per token."""


def find_factory(path: str, what: str = "model_path") -> Callable[..., Any]:
    """Return the function that ``module:factory`` or ``file.py:factory`` names; ``what`` it is, for messages.

    Raises:
        BadInput: not of this form, the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.rpartition(":")
    if not module_name or not name.isidentifier():
        raise BadInput(f"{what} {path!r} is not of the form module:factory", "for example examples.custom.line:build")
    module = _import(module_name)
    factory = getattr(module, name, None)
    if not callable(factory):
        own = (
            value
            for value in vars(module).values()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        there = [value.__name__ for value in own if not value.__name__.startswith("_")]
        message = f"module {module_name}: no function {name!r}; it has: {', '.join(there) or 'none'}"
        raise BadInput(message, "name the function that returns model and data sets")
    return cast(Callable[..., Any], factory)


def _import(name: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            return _import_file(Path(name))
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    except BadInput:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(
            f"module {name} cannot be imported: {where_it_failed(error)}", "repair it, or check model_path"
        ) from error


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise BadInput(f"{path}: no such file", "check model_path")
    name = f"muster_custom_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def run_factory(factory: Callable[..., Any], path: str, profile: Profile) -> CustomJob:
    """Call a factory and check what it returns.

    Raises:
        BadInput: it raised, or returned something else than model and data sets.
    """
    arguments = (profile,) if inspect.signature(factory).parameters else ()
    return _check(_as_job(call_factory(factory, path, *arguments), path), path)


def call_factory(factory: Callable[..., Any], path: str, *arguments: Any) -> Any:
    """Return what a function of the user's gives.

    Raises:
        BadInput: it raised; the message has the place in the user's code.
    """
    try:
        return factory(*arguments)
    except MusterError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(f"{path} failed: {where_it_failed(error)}", "repair it and start again") from error


def name_of(part: Callable[..., Any], what: str) -> str:
    """Return the ``module:name`` under which another process finds a function or class: :func:`find_factory` undone.

    What a script defines is found by the name of its file.

    Raises:
        BadInput: no import finds it: a lambda, something inside a function or class, an object, an interactive session.
    """
    name, module = str(getattr(part, "__qualname__", "")), str(getattr(part, "__module__", ""))
    if not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not part:
        kinds = {"<lambda>": "a lambda", "<locals>": "defined inside a function", ".": "defined inside a class"}
        kind = next((said for sign, said in kinds.items() if sign in name), f"a {type(part).__name__} object")
        hint = "define it with def or class at the top level of a module, or name it as text: module:name"
        raise BadInput(f"{what} is {kind}: no import finds it on another machine", hint)
    return f"{_script_name(what) if module == '__main__' else module}:{name}"


def _script_name(what: str) -> str:
    """Name under which another process imports the script that runs now."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name
    path = Path(getattr(main, "__file__", None) or "<session>")
    if path.suffix != ".py" or not path.is_file():
        raise BadInput(
            f"{what} is defined in an interactive session", "put it into a .py file and import it from there"
        )
    top = ast.parse(path.read_bytes()).body
    if not any(isinstance(part, ast.If) and "__name__" in ast.dump(part.test) for part in top):
        message = f"{what} is defined in {path.name}, which would train again wherever it is imported"
        raise BadInput(message, 'put what it does at its end under: if __name__ == "__main__":')
    return path.stem


def _as_job(made: Any, path: str) -> CustomJob:
    if isinstance(made, CustomJob):
        return made
    names = [field.name for field in dataclasses.fields(CustomJob)]
    if isinstance(made, tuple) and 2 <= len(made) <= len(names):
        return CustomJob(*made)
    if isinstance(made, Mapping):
        unknown = [str(key) for key in made if key not in names]
        if not unknown and {"model", "train"} <= made.keys():
            return CustomJob(**made)
        what = f"a mapping with {', '.join(map(str, made))}"
    else:
        what = type(made).__name__
    raise BadInput(f"{path} returned {what}", f"return a CustomJob, or a tuple or mapping of {', '.join(names)}")


def _check(job: CustomJob, path: str) -> CustomJob:
    if not isinstance(job.model, nn.Module):
        raise BadInput(f"{path}: the model is {type(job.model).__name__}, not a torch nn.Module", "return one")
    for name in ("train", "validation"):
        data = getattr(job, name)
        if data is not None or name == "train":
            check_data(data, f"{path}: {name}")
    for name in ("loss", "metrics", "collate", "weight"):
        part = getattr(job, name)
        if part is not None and not callable(part):
            raise BadInput(f"{path}: {name} is {type(part).__name__}, not a function", "return a function or None")
    return job


def check_data(data: Any, what: str) -> None:
    """Refuse data whose samples cannot be had by number, which is how they are dealt out to machines.

    Raises:
        BadInput: it is no map-style data set; the hint says what to give instead.
    """
    if isinstance(data, DataLoader):
        hint = "give its data set (loader.dataset), and its batch size and collate function as options of the run"
        raise BadInput(f"{what} is a DataLoader, and every machine makes batches of its own", hint)
    if isinstance(data, IterableDataset):
        hint = "give one with __len__ and __getitem__: list(data), if its samples fit into memory"
        raise BadInput(f"{what} is an IterableDataset, whose samples cannot be indexed", hint)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        message = f"{what} is {type(data).__name__}, without __len__ and __getitem__"
        raise BadInput(message, "give a map-style data set, or a function that returns one")


def where_it_failed(error: Exception) -> str:
    """Return an error of the user's code in one line, with the innermost place."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "importlib" not in frame.filename), None)
    text = " ".join(str(error).split()) or "no message"
    place = f" ({Path(last.filename).name}, line {last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {text}{place}"
