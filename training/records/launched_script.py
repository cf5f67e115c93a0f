"""A script that is launched: part of the plan of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LAUNCHED_FILES = "files"
"""Folder with the files that a launched script of rank 0 has written, if it ran in a copy."""


class LaunchedScript(BaseModel):
    """A script that every member runs unchanged, instead of one of Muster's tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: str
    """File, or with ``module`` the name after ``python -m``."""
    module: bool = False
    arguments: tuple[str, ...] = ()
    backend: Literal["auto", "muster", "script"] = "auto"
    """Which process groups Muster carries: those for which the script says gloo, NCCL or nothing; all; none."""
    folder: str = ""
    """Folder that is copied to each machine, where the script then runs; empty: it runs where it is."""
    restarts: int = Field(default=0, ge=0)
    """How often it is started again, in a new run, after a failure."""
    session: bool = False
    """Whether it trains in a session (:mod:`training.session.session`): it reports steps, obeys orders, and has a
    strategy and snapshots."""

    @property
    def title(self) -> str:
        return " ".join([f"-m {self.script}" if self.module else Path(self.script).name, *self.arguments])

    def relocated(self, folder: str) -> LaunchedScript:
        """Return the script with its folder moved to ``folder``."""
        script = self.script if self.module else Path(self.script).relative_to(self.folder).as_posix()
        return self.model_copy(update={"script": script, "folder": folder})
