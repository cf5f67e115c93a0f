"""Packs the program that carries out requests on a machine: modules of ours, in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from functools import lru_cache
from pathlib import Path

from distributed.agent.requests import MachineRequest

AGENT = "agent.py"
"""The program's file there."""
_IMPORTS = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
"""No ``ast.parse``: in several threads at once it fails (CPython issue 106905)."""
_MAIN = "distributed.agent.program"
_PACKED = """import sys,zlib,base64,json,importlib.machinery
class Sent:
    sources = json.loads(zlib.decompress(base64.b64decode({packed!r})))
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.sources:
            return importlib.machinery.ModuleSpec(name, cls, is_package=not cls.sources[name])
    @staticmethod
    def create_module(spec):
        return None
    @classmethod
    def exec_module(cls, module):
        exec(compile(cls.sources[module.__name__], module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Sent)
from distributed.agent.program import main
sys.exit(main())"""
"""The program: modules by name, each run when it is imported; a package there of the same name is not looked at."""


@lru_cache
def program(module: str = "") -> bytes:
    """Return the source of the program: whole, or as far as requests need it that ``module`` carries out."""
    modules = sources(module)
    packages = {".".join(words[:count]): "" for words in map(_words, modules) for count in range(1, len(words))}
    packed = base64.b64encode(zlib.compress(json.dumps(packages | modules).encode(), 9)).decode()
    return _PACKED.format(packed=packed).encode()


def sources(module: str = "") -> dict[str, str]:
    """Return the source of the program's modules by name; ``module`` as in :func:`program`."""
    everything = (kind.module for kind in MachineRequest.__subclasses__())
    collected: dict[str, str] = {}
    for name in (_MAIN, *([module] if module else everything)):
        _collect(name, collected)
    return collected


def _collect(name: str, collected: dict[str, str]) -> None:
    """Add a module of ours, and all that it imports anywhere."""
    path = Path(__file__).parents[2].joinpath(*_words(name)).with_suffix(".py")
    if name in collected or not path.is_file():
        return
    collected[name] = path.read_text(encoding="utf-8")
    for package, names in _IMPORTS.findall(collected[name]):
        for imported in (package, *(f"{package}.{word}" for word in re.findall(r"\w+", names))):
            _collect(imported, collected)


def _words(name: str) -> list[str]:
    return name.split(".")


@lru_cache
def version() -> str:
    """Return what names the program's folder there: a hash of it."""
    return hashlib.sha256(program()).hexdigest()[:16]
