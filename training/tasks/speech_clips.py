"""What a speech data set consists of: clips by split, and the names that columns and splits go by."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from profiles.errors import BadInput, counted
from training.tasks.tables import Table

logger = logging.getLogger("muster.data")

TEXT_COLUMNS = ("text", "text_verbatim", "text_perfect", "transcription", "sentence")
SPEAKER_COLUMNS = ("speaker", "speaker_id", "voice", "client_id")
"""Names that the column of who speaks goes by."""
NOISE_COLUMNS = ("snr", "noise")
"""Speech-to-noise ratio in dB, or the kind of noise."""
HELD_OUT = 0.1
"""Share of the training clips that is held out if there is no validation split."""
IN_TRAIN_TOO = "in the training data too: the WER promises too much"
HOW_TO_MEND = "repair or remove them, write other formats as WAV (ffmpeg -i OLD NEW.wav), or raise max_broken_share"

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Names a split goes by, as in Hugging Face's audiofolder."""
T = TypeVar("T")


def split_named(name: str) -> str:
    """Return the split that ``name`` stands for; empty if it stands for none."""
    lowered = name.lower()
    return next((split for split, names in SPLITS.items() if lowered in names), "")


def held_out(count: int) -> int:
    """Return how many of the training samples are held out if there is no validation split."""
    return max(1, round(count * HELD_OUT))


def by_split(find: Callable[[str], T | None]) -> dict[str, T]:
    """Return what there is of each split: what ``find`` gives for the first of its names that has anything."""
    hits = {split: next(filter(None, map(find, names)), None) for split, names in SPLITS.items()}
    return {split: hit for split, hit in hits.items() if hit is not None}


def existing(path: Path) -> Path | None:
    """Return a file that is there, else ``None``."""
    return path if path.is_file() else None


class AudioSource(Protocol):
    """Where the bytes of one recording are."""

    def stamp(self) -> str:
        """Something cheap that changes when the content does (size and time of a file)."""
        ...

    def read(self) -> bytes:
        """The bytes of the sound file.

        Raises:
            OSError: they cannot be read.
        """
        ...


@dataclass(frozen=True)
class FileSource:
    """A recording in a file."""

    path: Path
    absolute: bool = False
    """Whether its table gives an absolute path, which leads nowhere on another machine."""

    def stamp(self) -> str:
        try:
            status = self.path.stat()
        except OSError as error:
            return f"{self.path} {error.strerror}"
        return f"{self.path} {status.st_size} {status.st_mtime_ns} {status.st_mode}"

    def read(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class Clip:
    """One recording and what is said in it."""

    id: str
    audio: AudioSource
    text: str
    where: str
    """Where it came from, for messages: table and line, or the row of a hub data set."""
    language: str = ""
    duration: float | None = None
    """Length in seconds as the table says; ``None`` if it does not say."""
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Further columns of its table: who speaks, what noise there is, whatever a person noted."""
    left_out: str = ""
    """File and line of the patch that leaves it out; empty: none does."""


SpeechSplits = dict[str, list[Clip]]


def id_hash(identity: str) -> bytes:
    """Return what clips are ranked by where some are chosen: the same everywhere, whatever the others are."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest()


def hold_out(splits: SpeechSplits) -> SpeechSplits:
    """Return ``splits`` with a validation split: if there is none, 10 % of the training clips, by the hash of their id.

    Raises:
        BadInput: there is no training split, or it is too small to be divided.
    """
    train = splits.get("train")
    if not train:
        raise BadInput(f"the data set has no training split; it has: {', '.join(splits)}", "add train.csv")
    if "validation" in splits:
        return splits
    if len(train) < 2:
        raise BadInput("the data set has one clip and no validation split", "add clips, or validation.csv")
    ranked = sorted(train, key=lambda clip: id_hash(clip.id))
    held = {clip.id for clip in ranked[: held_out(len(train))]}
    logger.warning("no validation split: %d of %d training clips are held out to evaluate on", len(held), len(train))
    rest = [clip for clip in train if clip.id not in held]
    return {**splits, "train": rest, "validation": [clip for clip in train if clip.id in held]}


def find_text_column(table: Table, text_column: str) -> str:
    """Return the column with the transcripts: ``text_column``, or the first known name that is there.

    Raises:
        BadInput: there is none.
    """
    return table.column((text_column,) if text_column else TEXT_COLUMNS, "transcripts", "text_column")


def refused_as_long(clips: Sequence[Clip], what: str, window: float) -> BadInput:
    """Return the error of clips, ordered as they are in their table, that are ``what``.

    Args:
        window: seconds that the model hears.
    """
    names = named(clips)
    short = "window" in what and window < 30
    longer = ", or take a model that hears more: whisper-scratch hears 30 s" if short else ""
    hint = f"divide them (segment), set long_audio = cut or skip{longer}"
    return BadInput(f"{counted(len(clips), 'clip')} {what}: {names}", hint)


def named(clips: Sequence[Clip]) -> str:
    """Return the first of some clips, with their places."""
    return ", ".join(f"{clip.id} ({clip.where})" for clip in clips[:3]) + (", ..." if len(clips) > 3 else "")


def longer_than(window: float) -> str:
    """What clips are said to be that the model does not hear whole."""
    return f"longer than the model's window of {window:g} s"
