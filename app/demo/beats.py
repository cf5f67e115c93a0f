"""What a script is made of, and the small chances in it: the same for the same seed on every machine."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

from training.events import Event


@dataclass(frozen=True)
class LogLine:
    """One line in the log of a machine or of the hub."""

    log: str
    text: str


@dataclass(frozen=True)
class Beat:
    """Something that is written down at its time."""

    at: float
    """Seconds since the start of the script."""
    what: Event | LogLine


def dice(seed: int, *about: object) -> random.Random:
    """Return chances that depend on their subject only, so that one more machine does not change the others."""
    text = "/".join(str(part) for part in (seed, *about))
    return random.Random(hashlib.sha256(text.encode()).digest())


def in_order(beats: Iterable[Beat]) -> list[Beat]:
    """Return beats by their time; those of one moment stay as they came."""
    return sorted(beats, key=lambda beat: beat.at)
