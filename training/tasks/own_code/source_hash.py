"""Hashes of the source code of a user's functions and classes: whether a resumed run computes by the same code.

A hash covers the definition, and the definitions and plain values of its module that it names. Comments and layout do
not count, and what is installed (PyTorch, transformers) counts by its name.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

_INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def source_hash(definitions: Iterable[Any]) -> str:
    """Return the hash of functions, classes, or objects of these, in any order."""
    seen: dict[str, str] = {}
    for definition in definitions:
        _describe(definition, seen)
    return hashlib.blake2b(repr(sorted(seen.items())).encode(), digest_size=8).hexdigest()


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names whose hashes differ; none if nothing was recorded before."""
    return [name for name in {**before, **now} if before and before.get(name) != now.get(name)]


def _describe(definition: Any, seen: dict[str, str]) -> None:
    """Add a definition to ``seen``, and those of its module that it names."""
    if isinstance(definition, functools.partial):
        bound = [*enumerate(definition.args), *definition.keywords.items()]
        seen[f"partial {len(seen)}"] = repr([(name, _stable(value)) for name, value in bound])
        definition = definition.func
    definition = inspect.unwrap(getattr(definition, "__func__", definition))
    if not (inspect.isfunction(definition) or inspect.isclass(definition)):
        settings = {
            key: value for key, value in getattr(definition, "__dict__", {}).items() if isinstance(value, _PLAIN)
        }
        seen[f"object {len(seen)}"] = repr(settings)
        definition = definition if inspect.isbuiltin(definition) else type(definition)
    name = f"{getattr(definition, '__qualname__', definition)}"
    if name in seen or _is_installed(definition):
        seen.setdefault(name, str(definition.__module__))
        return
    seen[name] = ""  # it may name itself
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(definition)))
    except (OSError, TypeError, SyntaxError):  # no file, or a lambda in the middle of an expression
        code = getattr(definition, "__code__", None)
        seen[name] = _digest(code) if code is not None else "no source"
        names: Iterable[str] = code.co_names if code is not None else ()
    else:
        seen[name] = ast.dump(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for named, value in _named(definition, sorted(names)):
        if isinstance(value, _PLAIN):
            seen[f"{name} {named}"] = repr(value)
        elif (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == definition.__module__:
            _describe(value, seen)


def _named(definition: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    module = sys.modules.get(definition.__module__)
    available = getattr(definition, "__globals__", vars(module) if module is not None else {})
    return ((name, available[name]) for name in names if name in available and name != definition.__name__)


def _is_installed(definition: Any) -> bool:
    file = getattr(sys.modules.get(definition.__module__ or ""), "__file__", None)
    return file is None or any(folder in Path(file).resolve().parents for folder in _INSTALLED)


def _stable(value: Any) -> str:
    """Return a text that is the same in every process: an object's own may hold its address, a set's its order."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_stable, value)))}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_stable, value))})"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__


def _digest(code: CodeType) -> str:
    nested = [_digest(value) if isinstance(value, CodeType) else _stable(value) for value in code.co_consts]
    return hashlib.blake2b(repr((code.co_code, code.co_names, nested)).encode(), digest_size=8).hexdigest()
