"""Seam between a task and programs that do not train: data findings, memory, checks of machines, files to send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiles.schema import Profile
from training.tasks.inputs.model_size import ModelSize, size_of
from training.tasks.published_models import model_folder


class Substitute(NamedTuple):
    """A profile whose model suits a data set better."""

    profile: str
    options: Mapping[str, str]
    """Options that it takes over, by name."""
    reason: str
    """Why, in one line."""


class TaskInputs:
    """What the runs of a task need; this base suits a task that makes its own data. Nothing here loads torch."""

    packages: Sequence[str] = ()
    """Modules that a worker imports beside those that every worker needs."""

    reads_dataset: bool = False
    """Whether the task reads ``dataset_path``; the methods about data are only called if so, and the path is local."""

    def refusal_in_stages(self, profile: Profile) -> str:
        """Return why the model of a profile cannot lie on several devices; empty: it can."""
        return f"cannot train '{profile.model.task}' jobs yet"

    def findings(self, profile: Profile) -> dict[str, Any]:
        """Return what a data set holds, as the document of :mod:`training.workers.data_findings`.

        Raises:
            BadInput: it cannot be used; the message says what, where and what to do.
        """
        return {"splits": {}}

    def check_data(self, profile: Profile) -> None:
        """Check the tables of a data set, and that its files exist.

        Raises:
            BadInput: it cannot be used; the message says what, where and what to do.
        """

    def training_samples(self, profile: Profile) -> int:
        """Return the number of samples that a profile trains on; 0: unknown before they are prepared.

        Raises:
            BadInput: the data set cannot be used.
        """
        return 0

    def check_columns(self, profile: Profile, table: Path, columns: Sequence[str]) -> None:
        """Check the columns of a table on another machine.

        Raises:
            BadInput: one that the task needs is missing.
        """

    def substitute(self, profile: Profile) -> Substitute | None:
        """Return a profile for a data set that is too much for the model of this one; ``None``: it suits.

        Raises:
            BadInput: the data set cannot be used.
        """
        return None

    def can_select(self, profile: Profile) -> bool:
        """Return whether a data set may be made of those samples that can be read, where some or all cannot."""
        return False

    def files_of_table(self, profile: Profile, table: Path) -> Iterable[Path]:
        """Return the files and folders that have to be sent with a data set that is a single table."""
        return ()

    def model_size(self, profile: Profile) -> ModelSize | None:
        """Return the size of the model from files on this machine; ``None`` if it is unknown."""
        folder = model_folder(profile.model.model_path)
        return size_of(folder) if folder is not None else None
