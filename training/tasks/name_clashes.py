"""User modules with the name of one of Muster's packages, which Python would import in their place.

Their files are read, not run.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

from profiles.errors import BadInput
from profiles.installation import TOP

PACKAGES = ("app", "distributed", "profiles", "speech", "training")
_parsing = threading.Lock()


def refuse_clash(module: str, option: str) -> None:
    """Refuse a module (``name``, from the current folder, or ``path/to/file.py``) that is hidden by a package of
    Muster, or imports one that is, itself or through modules beside it.

    Raises:
        BadInput: names the module that is hidden.
    """
    file = Path(module).expanduser().resolve() if module.endswith(".py") else None
    root = file.parent if file is not None else Path.cwd()
    if root == TOP:
        return
    waiting, seen = ([file] if file is not None else _files_of(module, root, option)), set[Path]()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        for name in _imports(source, root):
            waiting += _files_of(name, root, option)


def syntax_of(file: Path) -> ast.Module:
    """Parse a Python file, in one thread at a time: Python 3.11 counts the depth of trees for all threads together.

    Raises:
        OSError, SyntaxError, ValueError: as ``ast.parse`` and reading do.
    """
    with _parsing:
        return ast.parse(file.read_bytes())


def _files_of(module: str, root: Path, option: str) -> list[Path]:
    """Return the files below ``root`` that importing a module runs."""
    names = module.split(".")
    files: list[Path] = []
    for count in range(1, len(names) + 1):
        path = root.joinpath(*names[:count])
        files = [*files, *(file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())]
    if names[0] in PACKAGES and files and files[-1] in (path.with_suffix(".py"), path / "__init__.py"):
        hidden = next(path for path in (root / f"{names[0]}.py", root / names[0]) if path.exists())
        problem = f"{hidden} has the name of a package of Muster, which is imported in its place"
        raise BadInput(problem, "rename it, and what imports it", option=option, place=option)
    return files


def _imports(file: Path, root: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports anywhere, relative ones as they are seen from ``root``."""
    try:
        tree = syntax_of(file)
    except (OSError, SyntaxError, ValueError):
        return  # importing it will report why
    package = file.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parent = ".".join([*base, *([node.module] if node.module else [])])
            yield from filter(None, [parent, *(f"{parent}.{alias.name}".strip(".") for alias in node.names)])
