"""``metadata.json``: what a run is, with which versions, and how it ended."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import BadInput
from training.bounded import first_problem
from training.plan import RunPlan

Status = Literal["starting", "running", "paused", "completed", "failed", "cancelled"]
FinalStatus = Literal["completed", "failed", "cancelled"]
FINAL: tuple[FinalStatus, ...] = ("completed", "failed", "cancelled")
RunType = Literal["local", "distributed"]
_PACKAGES = ("muster-train", "torch", "transformers", "peft", "cryptography", "pydantic")


class Earlier(BaseModel):
    """What the metadata of a run said before the attempt that is about to begin."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    status: Status
    end_time: str | None
    error_message: str
    command: list[str]
    attempt: int


class RunMetadata(BaseModel):
    """``metadata.json``. Times are ISO 8601 in UTC."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    run_id: str
    run_type: RunType = "local"
    status: Status = "starting"
    start_time: str
    end_time: str | None = None
    profile: str
    model: str = ""
    dataset: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    hosts: list[dict[str, Any]] = Field(default_factory=list)
    strategy: str = ""
    strategy_reason: str = ""
    """Why this strategy was taken."""
    engine: str = ""
    metrics: dict[str, Any] = Field(default_factory=dict)
    error_message: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    attempt: int = 1
    """1, and one more with every resume."""
    earlier: Earlier | None = None
    """Of a run that is being resumed, until it trains again: what it goes back to if it never does."""


SCRIPT = "script"
"""Stands for the strategy of a launched script: that is its own."""


def metadata_of(plan: RunPlan, command: list[str], run_type: RunType = "local", reason: str = "") -> RunMetadata:
    """Return the metadata of a run that starts with ``plan``."""
    profile = plan.profile
    return RunMetadata(
        run_id=plan.run_id,
        run_type=run_type,
        start_time=utc_now(),
        profile=profile.name,
        model=profile.model_name or profile.model.model_path,
        dataset=profile.dataset_name or profile.data.dataset_path,
        config=profile.model_dump(mode="json"),
        hosts=[member.model_dump(mode="json") for member in plan.members],
        strategy=SCRIPT if plan.launch else profile.strategy.strategy,
        strategy_reason=reason,
        engine=plan.engine,
        versions={"python": platform.python_version(), "platform": platform.platform(), **versions_of(_PACKAGES)},
        command=command,
    )


def read_metadata(path: Path) -> RunMetadata:
    """Read the metadata of the run folder ``path``.

    Raises:
        BadInput: there is none, or it is damaged.
    """
    try:
        return RunMetadata.model_validate_json((path / "metadata.json").read_bytes())
    except OSError as error:
        raise BadInput(f"not a run folder ({error.strerror}: metadata.json)", "see: runs list", file=path) from error
    except ValidationError as error:
        raise BadInput(f"metadata.json is damaged: {first_problem(error)}", "see: runs list", file=path) from error


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    return {package: version for package in packages if (version := _version(package)) is not None}


@functools.cache
def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def utc_now() -> str:
    """Return the time as ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def document(content: Any) -> bytes:
    """Return ``content`` as an indented JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def finite(value: Any) -> Any:
    """Replace what JSON cannot hold (NaN, infinities) by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
