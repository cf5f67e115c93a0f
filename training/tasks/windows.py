"""How much silence follows a clip: Whisper hears its whole window whatever the clip holds, so a short one costs less.

A clip's *window* is its sound, some silence, and what rounds both up to a common grid: so there are few shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MARGIN = 0.5
"""Seconds of silence after a clip at least: the model learns that a text ends where the sound does."""
GRID = 0.5
"""Seconds that windows are whole multiples of."""


@dataclass(frozen=True)
class Windows:
    """Frames that a model hears of a clip.

    Args:
        setting: ``full``, ``auto``, or seconds that a window lasts at least.
        full: frames of the model's own window.
        seconds: length of that in seconds.
        margin: seconds of silence after a clip at least.
        grid: seconds that windows are whole multiples of.
    """

    setting: str
    full: int
    seconds: float
    margin: float = MARGIN
    grid: float = GRID

    @property
    def are_cut(self) -> bool:
        """Whether a short clip costs less than a long one."""
        return self.setting != "full"

    def frames(self, sound: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the frames of the windows of clips with so many frames of sound, even numbers: the encoder's second
        convolution halves them."""
        held: npt.NDArray[np.int64] = np.asarray(sound, dtype=np.int64)
        if not self.are_cut:
            return np.full_like(held, self.full)
        rate = self.full / self.seconds
        grid = max(2, 2 * round(self.grid * rate / 2))
        least = 0.0 if self.setting == "auto" else float(self.setting) * rate
        wanted = np.maximum(held + self.margin * rate, least)
        rounded = np.ceil(wanted / grid).astype(np.int64) * grid
        cut: npt.NDArray[np.int64] = np.minimum(rounded, self.full)
        return cut
