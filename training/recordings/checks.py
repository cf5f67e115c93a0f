"""What is measured of a recording, and what is left out for it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.recordings.recording import ExclusionReason, Fault, Recording
from training.tasks.normalising import folded
from training.tasks.sound_file import Samples

RATE = 16_000
"""Samples a second of what is written."""

_QUIET_WINDOW = RATE // 10
_FULL_SCALE = 0.985  # a resampler lets flat tops ripple
_LOWEST = -200.0
_PRECEDENCE = ("test", "validation", "train")
"""The split that keeps a clip which is in several: what is evaluated on must not be trained on."""


@dataclass(frozen=True)
class Limits:
    """Outside of these a recording is left out."""

    shortest: float = 0.1
    """Seconds."""
    longest: float = 30.0
    """Seconds; Whisper hears 30."""
    silence: float = -60.0
    """RMS in dB of full scale that the loudest tenth of a second must reach."""
    clipped: float = 0.02
    """Share of samples that may be at full scale."""
    fewest_characters: float = 0.5
    """Of the transcript, a second of sound."""
    most_characters: float = 35.0
    """Of the transcript, a second of sound."""


@dataclass(frozen=True)
class Measures:
    """What was heard in one recording; none of it depends on :class:`Limits`."""

    seconds: float
    loudest: float = _LOWEST
    """RMS of the loudest tenth of a second in dB of full scale."""
    clipped: float = 0.0
    """Share of samples at full scale."""
    digest: str = ""
    """Hash of the samples at 16 bits; empty for a recording too long to be decoded."""
    fetched: int = 0
    """Bytes that came over the network for it."""


def to_16_bits(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Return samples between -1 and 1 as they are written, ``int16``."""
    return np.asarray(np.clip(np.rint(samples * 32768.0), -32768, 32767), dtype=np.int16)


def measure(samples: Samples, fetched: int = 0) -> Measures:
    """Measure mono samples at :data:`RATE`."""
    digest = hashlib.blake2b(to_16_bits(samples).tobytes(), digest_size=16).hexdigest()
    clipped = float((np.abs(samples) >= _FULL_SCALE).mean()) if len(samples) else 0.0
    return Measures(len(samples) / RATE, _loudest(samples), clipped, digest, fetched)


def _loudest(samples: Samples) -> float:
    """RMS of the loudest window in dB."""
    if not len(samples):
        return _LOWEST
    width = min(_QUIET_WINDOW, len(samples))
    starts = np.arange(0, len(samples), width)
    power = np.add.reduceat(samples.astype(np.float64) ** 2, starts) / width
    return max(_LOWEST, 10.0 * float(np.log10(max(float(power.max()), 1e-20))))


def judge_text(recording: Recording) -> Fault | None:
    """Return why a recording is left out before its sound is fetched, or ``None``."""
    if recording.fault is None and not recording.silence and not _spelled(recording):
        return Fault(
            ExclusionReason.NO_TEXT, "the transcript has no letter and no digit" if recording.text else "no transcript"
        )
    return recording.fault


def judge(recording: Recording, measures: Measures, limits: Limits) -> Fault | None:
    """Return why a recording is left out, or ``None``."""
    seconds = measures.seconds
    if seconds <= 0:
        return Fault(ExclusionReason.EMPTY, "holds no sound")
    if seconds > limits.longest:
        return Fault(ExclusionReason.TOO_LONG, f"{seconds:.1f} s, more than {limits.longest:g} s")
    if seconds < limits.shortest:
        return Fault(ExclusionReason.TOO_SHORT, f"{seconds:.2f} s, less than {limits.shortest:g} s")
    if recording.silence:
        return None
    if measures.loudest < limits.silence:
        return Fault(ExclusionReason.SILENT, f"at most {measures.loudest:.0f} dB of full scale")
    if measures.clipped > limits.clipped:
        return Fault(ExclusionReason.CLIPPED, f"{measures.clipped:.1%} of the samples are at full scale")
    rate = len(recording.text) / seconds
    if not limits.fewest_characters <= rate <= limits.most_characters:
        bounds = f"{limits.fewest_characters:g} to {limits.most_characters:g}"
        return Fault(ExclusionReason.CHARACTERS, f"{rate:.1f} characters a second, not {bounds}")
    return None


def doubles(clips: Sequence[tuple[Recording, str]]) -> list[Fault | None]:
    """Say of every clip whether it is left out: of the same sound twice a copy is, and all are whose transcripts
    contradict each other.

    Args:
        clips: recordings with the hash of their samples.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, (_, digest) in enumerate(clips):
        groups[digest].append(index)
    faults: list[Fault | None] = [None] * len(clips)
    for indices in groups.values():
        if len(indices) > 1:
            _judge_group([clips[index][0] for index in indices], indices, faults)
    return faults


def _judge_group(recordings: Sequence[Recording], indices: Sequence[int], faults: list[Fault | None]) -> None:
    first = min(range(len(indices)), key=lambda i: (_PRECEDENCE.index(recordings[i].split), i))
    one_text = len({_spelled(recording) for recording in recordings}) == 1
    for position, index in enumerate(indices):
        if not one_text:
            other = recordings[first if position != first else (first + 1) % len(indices)]
            faults[index] = Fault(ExclusionReason.CONTRADICTION, f"the same sound as {other.id}, with another text")
        elif position != first:
            faults[index] = Fault(ExclusionReason.DUPLICATE, f"the same sound and text as {recordings[first].id}")


def _spelled(recording: Recording) -> str:
    """Return the letters, with their marks, and digits of a text, without case."""
    return folded(recording.text, recording.language).replace(" ", "")
