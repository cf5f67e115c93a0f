"""Measures recordings, and decides which of them are left out of the data set."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiles.quantities import setting_text, share_text, span_text
from speech.data.sound_file import Samples
from speech.recordings.recording import Exclusion, ExclusionReason, Recording
from speech.scoring.text_normalisation import fold

RATE = 16_000
"""Samples a second of what is written."""

_LEVEL_WINDOW = RATE // 10
_FULL_SCALE = 0.985  # resampling makes the flat tops of clipped sound ripple
_LOWEST_LEVEL = -200.0
_PRECEDENCE = ("test", "validation", "train")
"""The split that keeps a clip which is in several: evaluation data must not be trained on."""


@dataclass(frozen=True)
class Limits:
    """Bounds outside which a recording is left out."""

    shortest: float = 0.1
    """Seconds."""
    longest: float = 30.0
    """Seconds; Whisper's window has 30."""
    silence: float = -60.0
    """RMS level in dB of full scale that the loudest tenth of a second must reach."""
    clipped: float = 0.02
    """Share of samples that may be at full scale."""
    fewest_characters: float = 0.5
    """Characters of the transcript per second of sound."""
    most_characters: float = 35.0
    """Characters of the transcript per second of sound."""


@dataclass(frozen=True)
class Measures:
    """Measurements of one recording; none of them depends on :class:`Limits`."""

    seconds: float
    loudest: float = _LOWEST_LEVEL
    """RMS level of the loudest tenth of a second in dB of full scale."""
    clipped: float = 0.0
    """Share of samples at full scale."""
    digest: str = ""
    """Hash of the 16-bit samples; empty for a recording that was too long to be decoded."""
    fetched: int = 0
    """Bytes that were downloaded for it."""


def to_16_bits(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Convert samples between -1 and 1 to ``int16``, as they are written."""
    return np.asarray(np.clip(np.rint(samples * 32768.0), -32768, 32767), dtype=np.int16)


def measure(samples: Samples, fetched: int = 0) -> Measures:
    """Measure mono samples at :data:`RATE`."""
    digest = hashlib.blake2b(to_16_bits(samples).tobytes(), digest_size=16).hexdigest()
    clipped = float((np.abs(samples) >= _FULL_SCALE).mean()) if len(samples) else 0.0
    return Measures(len(samples) / RATE, _loudest(samples), clipped, digest, fetched)


def _loudest(samples: Samples) -> float:
    """Return the RMS level of the loudest window in dB of full scale."""
    if not len(samples):
        return _LOWEST_LEVEL
    width = min(_LEVEL_WINDOW, len(samples))
    starts = np.arange(0, len(samples), width)
    power = np.add.reduceat(samples.astype(np.float64) ** 2, starts) / width
    return max(_LOWEST_LEVEL, 10.0 * float(np.log10(max(float(power.max()), 1e-20))))


def judge_text(recording: Recording) -> Exclusion | None:
    """Return why a recording is left out before its sound is read, or ``None``."""
    if recording.exclusion is None and not recording.silence and not _letters_and_digits(recording):
        return Exclusion(
            ExclusionReason.NO_TEXT, "the transcript has no letter and no digit" if recording.text else "no transcript"
        )
    return recording.exclusion


def judge(recording: Recording, measures: Measures, limits: Limits) -> Exclusion | None:
    """Return why a recording is left out by its measurements, or ``None``."""
    seconds = measures.seconds
    if seconds <= 0:
        return Exclusion(ExclusionReason.EMPTY, "holds no sound")
    if seconds > limits.longest:
        return Exclusion(ExclusionReason.TOO_LONG, f"{span_text(seconds)}, more than {span_text(limits.longest)}")
    if seconds < limits.shortest:
        return Exclusion(ExclusionReason.TOO_SHORT, f"{span_text(seconds)}, less than {span_text(limits.shortest)}")
    if recording.silence:
        return None
    if measures.loudest < limits.silence:
        return Exclusion(ExclusionReason.SILENT, f"at most {measures.loudest:.0f} dB of full scale")
    if measures.clipped > limits.clipped:
        return Exclusion(ExclusionReason.CLIPPED, f"{share_text(measures.clipped)} of the samples are at full scale")
    rate = len(recording.text) / seconds
    if not limits.fewest_characters <= rate <= limits.most_characters:
        bounds = f"{setting_text(limits.fewest_characters)} to {setting_text(limits.most_characters)}"
        return Exclusion(ExclusionReason.CHARACTERS, f"{rate:.1f} characters a second, not {bounds}")
    return None


def find_duplicates(clips: Sequence[tuple[Recording, str]]) -> list[Exclusion | None]:
    """Return for each clip why it is left out, or ``None``: of clips with the same sound and text one is kept, of clips
    with the same sound and different texts none.

    Args:
        clips: recordings with the hash of their samples.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, (_, digest) in enumerate(clips):
        groups[digest].append(index)
    exclusions: list[Exclusion | None] = [None] * len(clips)
    for indices in groups.values():
        if len(indices) > 1:
            _judge_group([clips[index][0] for index in indices], indices, exclusions)
    return exclusions


def _judge_group(recordings: Sequence[Recording], indices: Sequence[int], exclusions: list[Exclusion | None]) -> None:
    preferred = min(range(len(indices)), key=lambda i: (_PRECEDENCE.index(recordings[i].split), i))
    texts_agree = len({_letters_and_digits(recording) for recording in recordings}) == 1
    for position, index in enumerate(indices):
        if not texts_agree:
            duplicate = recordings[preferred if position != preferred else (preferred + 1) % len(indices)]
            exclusions[index] = Exclusion(
                ExclusionReason.CONTRADICTION, f"the same sound as {duplicate.id}, with another text"
            )
        elif position != preferred:
            exclusions[index] = Exclusion(
                ExclusionReason.DUPLICATE, f"the same sound and text as {recordings[preferred].id}"
            )


def _letters_and_digits(recording: Recording) -> str:
    """Return the letters (with their marks) and digits of a transcript, without case."""
    return fold(recording.text, recording.language).replace(" ", "")
