"""What a machine that has joined lets others run on it: three classes, from the strictest to the freest."""

from __future__ import annotations

from typing import Literal

LendClass = Literal["tasks", "friend", "own"]
CLASSES: tuple[LendClass, ...] = ("tasks", "friend", "own")
"""From the strictest to the freest."""
PERMITS: dict[LendClass, str] = {
    "tasks": "Muster's own tasks alone: data and weights arrive, code never does",
    "friend": "programs of others, in a box: they see their own folder and nothing else",
    "own": "every program, with the rights of its user",
}


def permits(lend: LendClass, needs: LendClass) -> bool:
    """Whether a machine of class ``lend`` runs what needs class ``needs``."""
    return CLASSES.index(lend) >= CLASSES.index(needs)
