"""What is kept of a run that ended before its work was done: said alike by the run itself and by whoever shows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from profiles.counts import counted

NOT_THIS_RUN = "start a new run instead"
"""Said in the hint of an error after which the run itself cannot go on, whatever its events tell of snapshots."""


def kept_step(newest: Mapping[int, tuple[int, Collection[int]]]) -> int | None:
    """Return the newest step of which all who trained then have a snapshot; ``None``: there is none.

    Args:
        newest: step of the newest snapshot of every member, and who trained then (empty: all that are named here).
    """
    for step, live in sorted(newest.values(), key=lambda one: -one[0]):
        if all(rank in newest and newest[rank][0] >= step for rank in live or newest):
            return step
    return None


def kept_text(kept: int | None, newest: int) -> str:
    """Say what is kept of a run whose last step was ``newest``."""
    if kept is None and not newest:
        return "no step was taken, so there is nothing to keep"
    lost = max(0, newest - (kept or 0))
    what = "no snapshot is kept" if kept is None else f"the snapshot of step {kept} is kept"
    return f"{what}, {counted(lost, 'step')} lost"
