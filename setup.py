"""Puts what lies beside the packages into the wheel: config.ini, the examples and the list of tested packages.

Everything else about the distribution stands in pyproject.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHARED = ("config.ini", "constraints.txt", "requirements.lock", "distributed_hosts.json.example", "examples")


class BuildWithShared(build_py):
    """Copies ``SHARED`` to ``muster/shared``, where ``profiles/installation.py`` looks for it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "muster", "shared")
        for name in SHARED:
            source = Path(__file__).with_name(name)
            if source.is_dir():
                shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target / name)


setup(cmdclass={"build_py": BuildWithShared})
