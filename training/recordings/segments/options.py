"""Options of cutting long recordings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentOptions:
    """What becomes a clip."""

    longest: float = 30.0
    """Seconds that a segment has at most."""
    agreement: float = 0.6
    """Segments whose text agrees less with what was heard are left out."""
    draft: bool = False
    """Without a transcript: take what the model heard as text."""
