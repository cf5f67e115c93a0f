"""Options of torchrun that people type out of habit: their meaning here, or a hint what to type instead."""

from __future__ import annotations

from pathlib import Path

from profiles.errors import BadInput
from profiles.installation import USUAL_HOSTS
from training.hardware.resources import count_gpus

NAMES = (
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
)
MEETING = tuple(f"--{spelled}" for name in NAMES for spelled in (name, name.replace("-", "_")))
"""torchrun's options for rendezvous."""


def process_count(words: str) -> int:
    """Return the number of processes per machine, also from torchrun's keywords; 0: one per GPU.

    Raises:
        BadInput: it is no number from 0 to 64.
    """
    if str(words).lower() in ("gpu", "auto"):
        return 0
    if not str(words).isdecimal() or int(words) > 64:
        raise BadInput(f"--nproc-per-node {words}: no number from 1 to 64", "leave it out: one for each GPU")
    return int(words)


def check_nodes(nodes: str) -> str:
    """
    Raises:
        BadInput: torchrun's number of machines is not 1.
    """
    if nodes and set(nodes.split(":")) != {"1"}:
        raise BadInput(
            f"--nnodes {nodes}: the machines are those of a hosts file", "leave it out, and name --hosts FILE"
        )
    return nodes


def restart_count(words: str) -> int:
    """Return how often a script is started again after a failure.

    Raises:
        BadInput: it is no number from 0 to 100.
    """
    if not str(words).isdecimal() or int(words) > 100:
        raise BadInput(f"--max-restarts {words}: no number from 0 to 100", "leave it out: none")
    return int(words)


def refuse_meeting(values: list[str] | None) -> list[str] | None:
    """
    Raises:
        BadInput: it is said how torchrun's nodes find one another.
    """
    if values:
        hint = "leave out --rdzv-..., --node-rank, --master-... and --local-addr; one launch starts all machines"
        raise BadInput("the processes find one another through a store of the run", hint)
    return values


def processes_here(local: int, processes_per_machine: int, hosts: Path | None, alone: bool) -> int:
    """Return the number of processes on this machine alone; 0: one per GPU, or the run uses a hosts file.

    Args:
        local: ``--local``.
        processes_per_machine: ``--nproc-per-machine``.
        alone: whether torchrun's options for a single machine were given.

    Raises:
        BadInput: options that exclude one another.
    """
    if hosts is not None and (local or alone):
        option = "--local" if local else "--standalone or --nnodes 1"
        raise BadInput(f"{option} and --hosts do not go together", "--local N is for this machine alone")
    if local and processes_per_machine:
        hint = f"--local N is the number of processes here: --local {processes_per_machine}, or leave --local out"
        raise BadInput("--local and --nproc-per-machine do not go together", hint)
    return local or (
        processes_per_machine or max(1, count_gpus())
        if alone or (processes_per_machine and not USUAL_HOSTS.is_file())
        else 0
    )
