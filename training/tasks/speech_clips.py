"""What a speech data set consists of: clips by split, and the names that columns and splits go by."""

from __future__ import annotations

import functools
import hashlib
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from profiles.errors import BadInput, counted
from profiles.installation import program
from training.tasks.sound_containers import SOUND_ENDINGS
from training.tasks.tables import Table
from training.tasks.transcript_text import odd_parts

logger = logging.getLogger("muster.data")

FILE_COLUMNS = ("audio_path", "file_name", "audio_filepath", "path", "file", "filename", "audio", "wav",
                "audio_file", "audio_filename", "file_path", "wav_filename", "wav_path")  # fmt: skip
"""Names that the column of recordings in files goes by."""
TEXT_COLUMNS = (
    *("text", "text_verbatim", "text_perfect", "transcription", "sentence"),
    *("transcript", "raw_text", "raw_transcription", "normalized_text", "utterance"),
)
LANGUAGE_COLUMNS = ("language", "lang", "locale", "source_lang")
SPEAKER_COLUMNS = ("speaker", "speaker_id", "voice", "client_id")
"""Names that the column of who speaks goes by."""
NOISE_COLUMNS = ("snr", "noise")
"""Speech-to-noise ratio in dB, or the kind of noise."""
SILENCE = "silence"
"""Column that says with ``yes`` that nobody speaks, so that the text is to be empty."""
OFFSET_COLUMNS = ("offset", "start", "start_time", "begin")
"""Names that the column goes by which says where in its file a recording begins."""
END_COLUMNS = ("end", "end_time", "stop")
_FURTHER_COLUMNS = ("id", "utt_id", "duration", *OFFSET_COLUMNS, *END_COLUMNS, "split", "kept", SILENCE)
COLUMNS = (*FILE_COLUMNS, *TEXT_COLUMNS, *LANGUAGE_COLUMNS, *SPEAKER_COLUMNS, *NOISE_COLUMNS, *_FURTHER_COLUMNS)
"""All names with a meaning."""
_LETTERED = 8
"""Of ten rows that have letters in a column of transcripts which nobody has named."""
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


def find_text_column(table: Table, text_column: str, option: str = "text_column") -> str:
    """Return the column with the transcripts: ``text_column``, or the first usual name that is there, or without one
    the column that holds sentences. Where others may be meant as well, a warning says which is taken.

    Raises:
        BadInput: there is none.
    """
    column = table.column((text_column,), "transcripts", option) if text_column else _untold_column(table, option)
    odd = [parts for row in table.rows if (parts := odd_parts(row.cells.get(column, "")))]
    if odd:
        done = "entities are read as their characters, tokens of models are left out"
        warn_once(f"{table.path}: {counted(len(odd), 'transcript')} with {odd[0][0]} or the like: {done}")
    return column


def _untold_column(table: Table, option: str) -> str:
    usual = [name for name in TEXT_COLUMNS if name in table.columns]
    column = usual[0] if usual else likely_text_column(table)
    spelled_so = [name for name in table.columns if name not in TEXT_COLUMNS and name.casefold() in TEXT_COLUMNS]
    others = [
        name
        for name in (*usual[1:], *spelled_so)
        if any(row.cells.get(name) != row.cells.get(column) for row in table.rows)
    ]
    if others or (column and not usual):
        beside = (
            f"; {' and '.join(map(repr, others))} {'is' if len(others) == 1 else 'are'} there too" if others else ""
        )
        warn_once(f"{table.path}: column {column!r} is taken for the transcripts{beside}; {option} names another")
    return column or table.column(TEXT_COLUMNS, "transcripts", option)


def likely_text_column(table: Table) -> str:
    """Return the column that holds the transcripts by what is in it; empty if none or several may.

    It has letters, but for a few rows that somebody forgot or that are a number, and leads to no file. Of several, it
    is the one with the longest texts of more than one word.
    """
    cells = {name: [row.text(name) for row in table.rows if name not in row.not_text] for name in table.columns}
    texts = {name: column for name, column in cells.items() if name not in COLUMNS and _are_texts(column)}
    sentences = {name: sum(map(len, column)) for name, column in texts.items() if _have_spaces(column)}
    return max(sentences, key=sentences.__getitem__) if sentences else next(iter(texts)) if len(texts) == 1 else ""


def _are_texts(cells: Sequence[str]) -> bool:
    lettered = sum(any(map(str.isalpha, cell)) for cell in cells)
    return lettered * 10 >= max(1, len(cells)) * _LETTERED and not any(map(_leads_to_file, cells))


def _leads_to_file(cell: str) -> bool:
    return "://" in cell or cell.lower().endswith(SOUND_ENDINGS)


def _have_spaces(cells: Sequence[str]) -> bool:
    return sum(" " in cell for cell in cells) * 2 >= len(cells)


@functools.cache
def warn_once(remark: str) -> None:
    """Tell a remark at the first of the times that a command reads the tables."""
    logger.warning("%s", remark)


def says_silence(columns: Mapping[str, str]) -> bool:
    """Whether the columns of a clip say that nobody speaks in it."""
    return columns.get(SILENCE, "").lower() in ("yes", "true", "1")


HEARS_MORE = "whisper-scratch"
"""Profile of a model that hears 30 s and needs no network."""
USUAL_WINDOW = 30.0
"""Seconds that a published Whisper hears."""


def refused_as_long(clips: Sequence[Clip], what: str, window: float, dataset: str, language: str) -> BadInput:
    """Return the error of clips, ordered as they are in their table, that are ``what``.

    Args:
        window: seconds that the model hears.
        dataset, language: of the settings; the command that trains on these clips has them.
    """
    names = named(clips)
    hint = "divide them (segment), set long_audio = cut or skip"
    if "window" in what and window < USUAL_WINDOW:
        words = [HEARS_MORE, "--dataset", shlex.quote(dataset), *(["--language", language] if language else [])]
        command = program("distributed-train", *words)
        hint += f", or take a model that hears more ({USUAL_WINDOW:g} s): {command}"
    return BadInput(f"{counted(len(clips), 'clip')} {what}: {names}", hint)


def named(clips: Sequence[Clip]) -> str:
    """Return the first of some clips, with their places."""
    return ", ".join(f"{clip.id} ({clip.where})" for clip in clips[:3]) + (", ..." if len(clips) > 3 else "")


def longer_than(window: float) -> str:
    """What clips are said to be that the model does not hear whole."""
    return f"longer than the model's window of {window:g} s"
