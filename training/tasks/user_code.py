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
