"""What a line of ``distributed-train`` asks for, checked before anything that takes seconds to import."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from app.cli.arguments import OUTPUT
from app.cli.terminal import somebody
from app.console import command_line
from profiles.declarations import owners
from profiles.errors import BadInput
from profiles.files.resolve import load_profile
from profiles.locations import looks_like_path, similar_path
from profiles.schema import PUBLISHED
from training.records.runs import find_run


@dataclass(frozen=True)
class TrainRequest:
    """Arguments of the command line."""

    profile: str = ""
    overrides: dict[str, str] = field(default_factory=dict)
    """Options and references by name, as text."""
    resume: str = ""
    trial: bool = False
    as_json: bool = False
    command: tuple[str, ...] = ()
    """The command line, for the run's metadata."""
    trust_code: bool = False
    """Whether user code that a file names may run."""
    no_input: bool = False
    detach: bool = False
    dashboard: bool = False
    plan_file: Path | None = None
    """A plan for several machines to execute."""
    allow_missing: bool = False
    offline_wheels: bool = False
    trust_new: bool = False
    plan_only: bool = False
    out: Path | None = None
    """File for the plan, with ``--try`` or ``--plan-only``."""
    details: bool = False
    """Whether to name strategy, codec, engine and the plan's hash."""

    def __post_init__(self) -> None:
        """Raise BadInput for conflicting options."""
        trial_option = "--try" if self.trial else "--plan-only"
        if self.trial and self.plan_only:
            raise BadInput("--try and --plan-only contradict each other", "--try really runs a few steps")
        if (self.trial or self.plan_only) and self.resume:
            raise BadInput(
                f"{trial_option} and --resume do not go together", f"use {trial_option} with the profile instead"
            )
        if self.out is not None and not (self.trial or self.plan_only):
            raise BadInput("--out needs a plan that is not carried out", "add --plan-only, or --try")

    @property
    def title(self) -> str:
        """What is started: a profile, a run, or a job of options alone."""
        return self.profile or self.resume or self.overrides.get("task", "train")

    @property
    def person(self) -> bool:
        """Whether there is a user to ask."""
        return not self.no_input and somebody(self.as_json)

    @property
    def is_complete(self) -> bool:
        """Whether the options alone say what to train: a task without profiles of its own, and its model."""
        task = self.overrides.get("task", "")
        return task in owners("model") and task not in PUBLISHED and bool(self.overrides.get("model_path"))

    def check_names(self) -> None:
        """Check the names of run, profile and options, and the paths that were typed.

        Raises:
            BadInput: one of them cannot be used.
        """
        if self.resume:
            find_run(Path(self.overrides.get("output_dir", OUTPUT)), self.resume)
            return
        if not self.profile:
            if not self.is_complete:
                raise no_profile()
            return
        profile = load_profile(self.profile, self.overrides).profile
        if not profile.data.local_data:  # else the path is one of the machines
            self._check_path("dataset", profile.data.dataset_path)
        if profile.model.trait in ("speech", "texts"):
            self._check_path("model", profile.model.model_path)

    def _check_path(self, option: str, path: str) -> None:
        """Refuse a path that was typed for an option, or its part ``..._path``, and leads nowhere."""
        names = [name for name in (option, f"{option}_path") if name in self.overrides]
        if not names or not looks_like_path(path) or Path(path).expanduser().exists():
            return
        similar = similar_path(Path(path).expanduser())
        flag = f"--{names[0].replace('_', '-')}"
        noun = "data set" if option == "dataset" else option
        raise BadInput(
            f"{noun} {path}: no such file or folder",
            f"did you mean {flag} {shlex.quote(str(similar))}?" if similar else f"check what {flag} names",
        )


def no_profile() -> BadInput:
    """Return the error of a line that names nothing to train."""
    example, lists = command_line("distributed-train", "demo"), command_line("profiles", "list")
    return BadInput("no profile given", f"type one first, for example {example} ...; {lists} lists them")
