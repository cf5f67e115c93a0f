"""Cross references in docstrings and comments lead to something that is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("profiles", "training", "distributed", "app", "speech", "tests", "benchmarks")
ENTRIES = ("cli_typer", "wizard")
ELSEWHERE = ("configparser", "torch")
"""Modules of others that are named; what is in them is not looked for."""
REFERENCE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?([\w.]+)`")

Members = dict[str, ast.AST]


@cache
def names(module: str) -> Members | None:
    """Return what a module of ours defines, by name; ``None`` where there is no such module."""
    place = ROOT.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not path.is_file():
        return {} if place.is_dir() else None
    return dict(_defined(ast.parse(path.read_text())))


def _defined(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Give what a module or class defines, also inside ``if`` and ``try``, and the attributes its methods set."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, child
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, child) for alias in child.names)
        elif isinstance(child, ast.If | ast.Try):
            yield from _defined(child)
        for target in [*getattr(child, "targets", []), getattr(child, "target", None)]:
            if isinstance(target, ast.Name | ast.Tuple):
                yield from ((n.id, child) for n in ast.walk(target) if isinstance(n, ast.Name))
    if isinstance(node, ast.ClassDef):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                yield inner.attr, inner


def has(module: str, path: list[str], known: Members) -> bool:
    """Whether ``path`` leads to something among the names ``known`` of a module."""
    if not path:
        return True
    found = known.get(path[0])
    if found is None:
        return False
    if isinstance(found, ast.ClassDef):
        return has(module, path[1:], members(module, found))
    if isinstance(found, ast.ImportFrom):
        original = next(alias.name for alias in found.names if (alias.asname or alias.name) == path[0])
        whole = f"{found.module}.{original}".split(".") + path[1:]
        return whole[0] not in ROOMS or resolves(whole)
    return len(path) == 1 or isinstance(found, ast.Import)


@cache
def members(module: str, node: ast.ClassDef) -> Members:
    """Return what a class has, with what its bases in the same module have."""
    found: Members = {}
    for base in node.bases:
        inherited = (names(module) or {}).get(base.id) if isinstance(base, ast.Name) else None
        if isinstance(inherited, ast.ClassDef):
            found |= members(module, inherited)
    return found | dict(_defined(node))


def resolves(path: list[str]) -> bool:
    """Whether a full path leads to a module of ours, or to something in one."""
    for end in range(len(path), 0, -1):
        module = ".".join(path[:end])
        known = names(module)
        if known is not None:
            return has(module, path[end:], known)
    return False


def resolves_inside(module: str, path: list[str]) -> bool:
    """Whether a short path leads to something in its own module or in one of its classes."""
    known = names(module) or {}
    classes = [node for node in known.values() if isinstance(node, ast.ClassDef)]
    return has(module, path, known) or any(has(module, path, members(module, node)) for node in classes)


def leads_somewhere(module: str, target: str) -> bool:
    path = target.split(".")
    if path[0] in (*ROOMS, *ENTRIES):
        return resolves(path)
    return resolves_inside(module, path) or path[0] in ELSEWHERE


@pytest.mark.slow
def test_every_reference_leads_somewhere() -> None:
    lost = []
    for file in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            targets = [match[1] for match in REFERENCE.finditer(line) if not leads_somewhere(module, match[1])]
            lost += [f"{file.relative_to(ROOT)}:{number}: {target}" for target in targets]
    assert lost == []


def test_a_lost_reference_is_noticed() -> None:
    here = "distributed.ssh.connection"
    for target in ("distributed.ssh", "distributed.ssh.errors.SshError", "SshConnection.connect", "run", "Trust"):
        assert leads_somewhere(here, target), target
    for target in ("distributed.access", "distributed.ssh.errors.Nothing", "SshConnection.nothing", "nothing"):
        assert not leads_somewhere(here, target), target


@pytest.mark.slow
def test_every_import_of_our_own_finds_what_it_names() -> None:
    """In functions too, which no start runs; mypy does not read the benchmarks."""
    lost = []
    for file in sorted(path for room in ("tests", "benchmarks") for path in (ROOT / room).rglob("*.py")):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        for node in (one for one in imports if (one.module or "").split(".")[0] in ROOMS):
            wanted = [f"{node.module}.{alias.name}".split(".") for alias in node.names]
            lost += [f"{file.relative_to(ROOT)}:{node.lineno}: {'.'.join(one)}" for one in wanted if not resolves(one)]
    assert lost == []
