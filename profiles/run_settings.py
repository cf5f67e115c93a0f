"""The options of how a run goes: where it runs and writes, how its work is divided, what it leaves to others."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from profiles.declarations import OptionError, Section, option
from profiles.installation import RUNS_FOLDER

FITTED = ("batch_size", "eval_batch_size", "gradient_checkpointing", "tuning", "base_precision", "learning_rate")
"""Options that can be fitted to the machines' memory; ``batch_size`` together with ``gradient_accumulation``."""

TRACKERS = ("csv", "tensorboard", "wandb", "trackio")
"""Trackers that a run's events can be sent to."""


def tracker_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once.

    Raises:
        OptionError: one of them is unknown.
    """
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise OptionError("trackers", f"'{name}' is none of {', '.join(TRACKERS)}")
    return names


class RunSettings(Section):
    """Where results go, and the local workers."""

    output_dir: str = option(str(RUNS_FOLDER), "folder of the run folders", kind="path")
    hosts: str = option(
        "",
        "machines that train: a hosts file, or names separated by commas; empty: this machine",
        kind="path",
    )
    workers: int = option(
        1, "workers on this machine (--local); if nobody sets it, one for each GPU where all are alike", ge=1, le=64
    )
    layout: Literal["auto", "replicate", "pipeline", "shard", "tensor"] = option(
        "auto",
        "what each device holds; replicate: the whole model; pipeline: some of its blocks, through which the "
        "micro-batches of a batch pass, for a model that no device holds; for devices of one machine shard: a part of "
        "every weight, or tensor: of every matrix; auto: pipeline where no other setting makes the model fit",
    )
    offload: bool = option(
        False, "with layout = shard, keep what GPUs need only at times in main memory; slower", advanced=True
    )
    stages: int = option(0, "devices of a member with layout = pipeline; 0: as planned, or all", ge=0, le=64)
    simulate: int = option(
        0, "members to simulate on this machine, in one process that takes turns; 0: off", ge=0, le=1024
    )
    cluster: str = option("", "file of machines to simulate and their times (docs/how-to/scale.md)", kind="path")
    shares: str = option(
        "", "relative share of the batch for each worker, separated by commas (2,1); empty: equal", advanced=True
    )
    balance: Literal["auto", "on", "off"] = option(
        "auto", "whether shares follow measured speed; auto: on several machines, unless shares are set", advanced=True
    )
    be_polite: bool = option(
        False,
        "workers have low priority, and compute a quarter of the time while somebody uses their machine, other "
        "programs need its processors, it runs on battery, or is hot; for one machine: be_polite in the hosts file",
    )
    fit_memory: str = option(
        "auto",
        f"settings to fit to machines' memory, separated by commas ({', '.join(FITTED)}); auto: those that neither a "
        "profile nor the command line sets; off: none. Each of them may itself be auto",
        advanced=True,
    )
    trackers: str = option(
        "", f"trackers that the run's events are also sent to, separated by commas: {', '.join(TRACKERS)}"
    )
    lease: float = option(
        30.0,
        "machines stop workers that cannot elect a coordinator after so long without a sign of who started them",
        unit="s",
        ge=2,
        advanced=True,
    )

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, trackers: str) -> str:
        return ",".join(tracker_names(trackers))

    @field_validator("fit_memory")
    @classmethod
    def _known_fitted(cls, fitted: str) -> str:
        if fitted in ("auto", "off"):
            return fitted
        names = [name.strip() for name in fitted.split(",") if name.strip()]
        if not names or any(name not in FITTED for name in names):
            raise OptionError("fit_memory", f"auto, off, or some of {', '.join(FITTED)}")
        return ", ".join(name for name in FITTED if name in names)

    @field_validator("shares")
    @classmethod
    def _positive_numbers(cls, shares: str) -> str:
        numbers = [number.strip() for number in shares.split(",")] if shares.strip() else []
        if not all(re.fullmatch(r"\d*\.?\d+", number) and float(number) > 0 for number in numbers):
            raise OptionError("shares", "positive numbers by comma, one for each worker, for example 2,1")
        return ",".join(numbers)
