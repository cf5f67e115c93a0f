"""User-defined functions and classes: import them by name, call them, and name them for other processes.

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
from training.tasks.base import GroupPosition
from training.tasks.name_clashes import refuse_clash, syntax_of


def find_factory(path: str, title: str = "model_path") -> Callable[..., Any]:
    """Import the function named by ``module:factory`` or ``file.py:factory``; ``title`` is used in error messages.

    Raises:
        BadInput: malformed name, the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.rpartition(":")
    if not module_name or not name.isidentifier():
        raise BadInput(f"{title} {path!r} is not of the form module:factory", "for example examples.custom.line:build")
    module = _import(module_name, title)
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = (
            value
            for value in vars(module).values()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        names = [value.__name__ for value in functions if not value.__name__.startswith("_")]
        message = f"module {module_name}: no function {name!r}; it has: {', '.join(names) or 'none'}"
        hint = "name the function that returns model and data sets" if title == "model_path" else f"check {title}"
        raise BadInput(message, hint)
    return cast(Callable[..., Any], factory)


def _import(name: str, title: str) -> ModuleType:
    refuse_clash(name, title)
    try:
        if name.endswith(".py"):
            return _import_file(Path(name), title)
        if "" not in sys.path:
            _make_importable(Path.cwd())
        return importlib.import_module(name)
    except BadInput:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(
            f"module {name} cannot be imported: {where_it_failed(error)}", f"repair it, or check {title}"
        ) from error


def _make_importable(folder: Path) -> None:
    """Add a folder to the module search path, as Python does for that of a script."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import_file(path: Path, title: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise BadInput(f"{path}: no such file", f"check {title}")
    _make_importable(path.parent)
    name = f"muster_custom_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def takes_rank(function: Callable[..., Any]) -> bool:
    """Whether a user's function has a parameter ``rank`` or ``world_size``."""
    try:
        return bool(inspect.signature(function).parameters.keys() & GroupPosition._fields)
    except (TypeError, ValueError):
        return False


def call_factory(factory: Callable[..., Any], path: str, *arguments: Any, position: GroupPosition | None = None) -> Any:
    """Call a user's function, passing ``rank`` and ``world_size`` of ``position`` if it takes them.

    Raises:
        BadInput: it raised; the message names the line of the user's code.
    """
    try:
        available = position._asdict() if position is not None and takes_rank(factory) else {}
        accepted = available.keys() & inspect.signature(factory).parameters
        return factory(*arguments, **{name: available[name] for name in accepted})
    except MusterError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(f"{path} failed: {where_it_failed(error)}", "repair it and start again") from error


def importable_name(definition: Callable[..., Any], title: str) -> str:
    """Return the ``module:name`` by which another process imports a function or class, the inverse of
    :func:`find_factory`.

    Definitions of the main script are named by its file.

    Raises:
        BadInput: not importable: a lambda, nested in a function or class, an object, or from an interactive session.
    """
    name, module = str(getattr(definition, "__qualname__", "")), str(getattr(definition, "__module__", ""))
    if not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not definition:
        kinds = {"<lambda>": "a lambda", "<locals>": "defined inside a function", ".": "defined inside a class"}
        default = f"a {type(definition).__name__} object"
        kind = next((description for marker, description in kinds.items() if marker in name), default)
        hint = "define it with def or class at the top level of a module, or name it as text: module:name"
        raise BadInput(f"{title} is {kind}: no import finds it on another machine", hint)
    return f"{_script_name(title) if module == '__main__' else module}:{name}"


def _script_name(title: str) -> str:
    """Return the name by which another process imports the main script."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name
    path = Path(getattr(main, "__file__", None) or "<session>")
    if path.suffix != ".py" or not path.is_file():
        raise BadInput(
            f"{title} is defined in an interactive session", "put it into a .py file and import it from there"
        )
    top = syntax_of(path).body
    if not any(isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test) for statement in top):
        message = f"{title} is defined in {path.name}, which would train again wherever it is imported"
        raise BadInput(message, 'put what it does at its end under: if __name__ == "__main__":')
    return path.stem
