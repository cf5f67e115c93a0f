"""Functions and classes of the user's own: found by name, called, and named for other processes.

A name is ``module:factory`` or ``path/to/file.py:factory``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from profiles.errors import BadInput, MusterError, where_it_failed
from training.name_clashes import refuse_clash
from training.tasks.base import Place


def find_factory(path: str, what: str = "model_path") -> Callable[..., Any]:
    """Return the function that ``module:factory`` or ``file.py:factory`` names; ``what`` it is, for messages.

    Raises:
        BadInput: not of this form, the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.rpartition(":")
    if not module_name or not name.isidentifier():
        raise BadInput(f"{what} {path!r} is not of the form module:factory", "for example examples.custom.line:build")
    module = _import(module_name, what)
    factory = getattr(module, name, None)
    if not callable(factory):
        own = (
            value
            for value in vars(module).values()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        there = [value.__name__ for value in own if not value.__name__.startswith("_")]
        message = f"module {module_name}: no function {name!r}; it has: {', '.join(there) or 'none'}"
        meant = "name the function that returns model and data sets" if what == "model_path" else f"check {what}"
        raise BadInput(message, meant)
    return cast(Callable[..., Any], factory)


def _import(name: str, what: str) -> ModuleType:
    refuse_clash(name, what)
    try:
        if name.endswith(".py"):
            return _import_file(Path(name), what)
        if "" not in sys.path:
            _make_importable(Path.cwd())
        return importlib.import_module(name)
    except BadInput:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(
            f"module {name} cannot be imported: {where_it_failed(error)}", f"repair it, or check {what}"
        ) from error


def _make_importable(folder: Path) -> None:
    """Let modules in a folder be found, as those beside a script are."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import_file(path: Path, what: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise BadInput(f"{path}: no such file", f"check {what}")
    _make_importable(path.parent)
    name = f"muster_custom_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def takes_place(function: Callable[..., Any]) -> bool:
    """Whether a function of the user's asks which member it makes something for, by ``rank`` or ``world_size``."""
    try:
        return bool(inspect.signature(function).parameters.keys() & Place._fields)
    except (TypeError, ValueError):
        return False


def call_factory(factory: Callable[..., Any], path: str, *arguments: Any, place: Place | None = None) -> Any:
    """Return what a function of the user's gives, told of its ``place`` what it asks for.

    Raises:
        BadInput: it raised; the message has the place in the user's code.
    """
    try:
        known = place._asdict() if place is not None and takes_place(factory) else {}
        return factory(
            *arguments, **{name: known[name] for name in known.keys() & inspect.signature(factory).parameters}
        )
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
