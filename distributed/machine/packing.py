"""Packs the program that carries out requests on a machine: modules of ours, in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from functools import lru_cache
from pathlib import Path

AGENT = "agent.py"
"""The program's file there."""
MODULES = (
    "distributed.system",
    "distributed.machine.requests",
    "distributed.machine.agent",
    "distributed.machine.agent_files",
    "distributed.checks.machine_health",
    "distributed.checks.data_probe",
    "distributed.measuring.link_transfer",
    "distributed.measuring.link_probe",
    "distributed.preparation.environment_builder",
    "training.hardware.resources",
    "training.hardware.sensors",
    "training.records.lease",
    "distributed.machine.program",
)
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
from distributed.machine.program import main
sys.exit(main())"""
"""The program: modules by name, each run when it is imported; a package there of the same name is not looked at."""


@lru_cache
def program() -> bytes:
    """Return the source of the program that carries out requests on a machine."""
    top = Path(__file__).parents[2]
    sources = {name: (top / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8") for name in MODULES}
    packages = {name.rpartition(".")[0]: "" for name in MODULES} | {name.partition(".")[0]: "" for name in MODULES}
    packed = base64.b64encode(zlib.compress(json.dumps(packages | sources).encode(), 9)).decode()
    return _PACKED.format(packed=packed).encode()


@lru_cache
def version() -> str:
    """Return what names the program's folder there: a hash of it."""
    return hashlib.sha256(program()).hexdigest()[:16]
