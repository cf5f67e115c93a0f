"""Clips of speech data sets, and the recognised names of columns and splits."""

from __future__ import annotations

import functools
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from profiles.errors import BadInput, counted
from profiles.installation import program
from profiles.quantities import span_text
from speech.data.path_resolution import resolve_path
from speech.data.sound_containers import SOUND_ENDINGS
from training.tasks.data_files.plain_text import find_markup
from training.tasks.data_files.splits import SPEAKER_COLUMNS, held_out_count, id_hash
from training.tasks.data_files.tables import Table

logger = logging.getLogger("muster.data")

FILE_COLUMNS = ("audio_path", "file_name", "audio_filepath", "path", "file", "filename", "audio", "wav",
                "audio_file", "audio_filename", "file_path", "wav_filename", "wav_path")  # fmt: skip
"""Recognised names of the column with the recordings' files."""
TEXT_COLUMNS = (
    *("text", "text_verbatim", "text_perfect", "transcription", "sentence"),
    *("transcript", "raw_text", "raw_transcription", "normalized_text", "utterance"),
)
LANGUAGE_COLUMNS = ("language", "lang", "locale", "source_lang")
NOISE_COLUMNS = ("snr", "noise")
"""Speech-to-noise ratio in dB, or the kind of noise."""
SILENCE = "silence"
"""Column in which ``yes`` marks a clip without speech, whose text is empty on purpose."""
OFFSET_COLUMNS = ("offset", "start", "start_time", "begin")
"""Recognised names of the column with a recording's start in its file."""
END_COLUMNS = ("end", "end_time", "stop")
_FURTHER_COLUMNS = ("id", "utt_id", "duration", *OFFSET_COLUMNS, *END_COLUMNS, "split", "kept", SILENCE)
COLUMNS = (*FILE_COLUMNS, *TEXT_COLUMNS, *LANGUAGE_COLUMNS, *SPEAKER_COLUMNS, *NOISE_COLUMNS, *_FURTHER_COLUMNS)
"""All recognised names."""
_SAMPLED_ROWS = 20
"""Rows of a table whose cells are looked at to recognise the column of the recordings."""
LONGEST_PATH = 4096
"""Characters of a path or address in a table."""
_MIN_LETTERED = 8
"""Minimum number of rows in ten with letters, for a column to be guessed as transcripts."""
LEAKAGE_REMARK = "in the training data too: the WER promises too much"
FEW_CLIPS = 20
"""Clips to train on below which a remark says that they are few."""
SENSIBLE_AMOUNT = "40 sentences (about 3 minutes) are a start, 10 minutes or more are sensible"
"""Measured in docs/how-to/whisper.md, Few recordings."""
REPAIR_HINT = "repair or remove them, write other formats as WAV (ffmpeg -i OLD NEW.wav), or raise max_broken_share"


class AudioSource(Protocol):
    """Source of the bytes of one recording."""

    def stamp(self) -> str:
        """Return a cheap fingerprint that changes with the content (size and mtime of a file)."""
        ...

    def read(self) -> bytes:
        """Return the bytes of the audio file.

        Raises:
            OSError: they cannot be read.
        """
        ...


@dataclass(frozen=True)
class FileSource:
    """A recording in a file."""

    path: Path
    absolute: bool = False
    """Whether its table gives an absolute path, which is invalid on other machines."""

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
    """One recording and its transcript."""

    id: str
    audio: AudioSource
    text: str
    location: str
    """Origin for messages: table and line, or the row of a hub data set."""
    language: str = ""
    duration: float | None = None
    """Duration in seconds according to the table; ``None`` if not given."""
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Further columns of its table: speaker, noise, or any others."""
    left_out: str = ""
    """File and line of the patch that leaves it out; empty if none does."""


SpeechSplits = dict[str, list[Clip]]


def too_few(count: int) -> str:
    """Return a remark on so many clips to train on; empty where they are enough to begin with."""
    return (
        "" if count >= FEW_CLIPS else f"{counted(count, 'clip')} to train on: too few to learn much; {SENSIBLE_AMOUNT}"
    )


def hold_out(splits: SpeechSplits, tell: Callable[[str], None] | None = None) -> SpeechSplits:
    """Return ``splits`` with a validation split: if missing, 10 % of the training clips, by the hash of their id.

    Args:
        tell: takes a remark on what is held out; by default it is logged once as a warning.

    Raises:
        BadInput: there is no training split, or it is too small to divide.
    """
    train = splits.get("train")
    if not train:
        raise BadInput(f"the data set has no training split; it has: {', '.join(splits)}", "add train.csv")
    if "validation" in splits:
        return splits
    if len(train) < 2:
        hint = f"add clips, or validation.csv; {SENSIBLE_AMOUNT}"
        raise BadInput("the data set has one clip and no validation split", hint)
    tell = tell or warn_once
    ranked = sorted(train, key=lambda clip: id_hash(clip.id))
    held = {clip.id for clip in ranked[: held_out_count(len(train))]}
    verb = "is" if len(held) == 1 else "are"
    tell(f"no validation split: {len(held)} of {len(train)} training clips {verb} held out to evaluate on")
    remaining = [clip for clip in train if clip.id not in held]
    return {**splits, "train": remaining, "validation": [clip for clip in train if clip.id in held]}


def leaked_clips(splits: SpeechSplits) -> list[Clip]:
    """Return the clips of other splits whose recordings are also in the training split."""
    trained = {name for clip in splits.get("train", ()) for name in files_of_clip(clip)}
    others = (clip for split, clips in splits.items() if split != "train" for clip in clips)
    return [clip for clip in others if trained.intersection(files_of_clip(clip))]


def files_of_clip(clip: Clip) -> list[str]:
    """Return the absolute path of a clip's file; empty where it is none."""
    return [os.path.abspath(clip.audio.path)] if isinstance(clip.audio, FileSource) else []


def find_audio_column(
    table: Table, names: Sequence[str] = FILE_COLUMNS, audio_column: str = "", option: str = ""
) -> str:
    """Return the column with the recordings: ``audio_column``, the first of ``names``, or the only one whose cells name
    sound files.

    Raises:
        BadInput: there is none.
    """
    if not audio_column and not any(name in table.columns for name in names):
        rows = table.rows[:_SAMPLED_ROWS]
        columns = [
            name for name in table.columns if _name_sounds(table.path.parent, [row.cells.get(name, "") for row in rows])
        ]
        if len(columns) == 1:
            return columns[0]
    return table.column((audio_column,) if audio_column else names, "recordings", option)


def _name_sounds(folder: Path, cells: Sequence[str]) -> bool:
    """Whether all cells end as sound files do, or most of them name one in a folder, with or without its ending."""
    if not cells or all(cell.lower().endswith(SOUND_ENDINGS) for cell in cells):
        return bool(cells)
    paths = [resolve_path(folder, cell) for cell in cells if cell and len(cell) <= LONGEST_PATH]
    sounds = [path for path in paths if path.suffix.lower() in SOUND_ENDINGS and path.is_file()]
    return 2 * len(sounds) > len(cells)


def find_text_column(table: Table, text_column: str, option: str = "text_column", audio: str = "") -> str:
    """Return the column with the transcripts: ``text_column``, the first recognised name, or a column of sentences.

    Warns if the choice is ambiguous.

    Args:
        audio: the column with the recordings, which holds no transcripts.

    Raises:
        BadInput: there is none.
    """
    column = table.column((text_column,), "transcripts", option) if text_column else _guess_column(table, option, audio)
    markup = [found_markup for row in table.rows if (found_markup := find_markup(row.cells.get(column, "")))]
    if markup:
        done = "entities are read as their characters, tokens of models are left out"
        warn_once(f"{table.path}: {counted(len(markup), 'transcript')} with {markup[0][0]} or the like: {done}")
    return column


def _guess_column(table: Table, option: str, audio: str) -> str:
    usual = [name for name in TEXT_COLUMNS if name in table.columns]
    column = usual[0] if usual else likely_text_column(table, audio)
    variants = [name for name in table.columns if name not in TEXT_COLUMNS and name.casefold() in TEXT_COLUMNS]
    others = [
        repr(table.spelling_of(name))
        for name in (*usual[1:], *variants)
        if any(row.cells.get(name) != row.cells.get(column) for row in table.rows)
    ]
    if others or (column and not usual):
        verb = "is" if len(others) == 1 else "are"
        alternatives = f"; {' and '.join(others)} {verb} there too" if others else ""
        taken = f"column {table.spelling_of(column)!r} is taken for the transcripts"
        warn_once(f"{table.path}: {taken}{alternatives}; {option} names another")
    return column or table.column(TEXT_COLUMNS, "transcripts", option)


def likely_text_column(table: Table, audio: str = "") -> str:
    """Guess the column with the transcripts by its contents; empty if there is none, or no clear choice.

    Most of its rows have letters, and none is a path or URL. Among several, it is the one with the longest sentences.
    """
    cells = {name: [row.text(name) for row in table.rows if name not in row.not_text] for name in table.columns}
    texts = {name: column for name, column in cells.items() if name not in (*COLUMNS, audio) and _are_texts(column)}
    sentences = {name: sum(map(len, column)) for name, column in texts.items() if _have_spaces(column)}
    return max(sentences, key=sentences.__getitem__) if sentences else next(iter(texts)) if len(texts) == 1 else ""


def _are_texts(cells: Sequence[str]) -> bool:
    lettered = sum(any(map(str.isalpha, cell)) for cell in cells)
    return lettered * 10 >= max(1, len(cells)) * _MIN_LETTERED and not any(map(_leads_to_file, cells))


def _leads_to_file(cell: str) -> bool:
    return "://" in cell or cell.lower().endswith(SOUND_ENDINGS)


def _have_spaces(cells: Sequence[str]) -> bool:
    return sum(" " in cell for cell in cells) * 2 >= len(cells)


@functools.cache
def warn_once(remark: str) -> None:
    """Log a remark only the first time, as a command may read the tables several times."""
    logger.warning("%s", remark)


def first_of(cells: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first non-empty cell of these columns."""
    return next((cells[name] for name in names if cells.get(name)), "")


def repair_hint(table: Path) -> str:
    """Return what to do about lines of a table that cannot be used."""
    return f"mend such lines, or leave them out: {program('data', 'prepare', shlex.quote(str(table)), '--out NEW')}"


def says_silence(columns: Mapping[str, str]) -> bool:
    """Whether a clip's columns mark it as having no speech."""
    return columns.get(SILENCE, "").lower() in ("yes", "true", "1")


LONG_WINDOW_PROFILE = "whisper-scratch"
"""Profile of a model with a 30 s window that needs no network."""
PUBLISHED_WINDOW = 30.0
"""Window of published Whisper models, in seconds."""


def long_clip_error(clips: Sequence[Clip], problem: str, window: float, dataset: str, language: str) -> BadInput:
    """Return the error for clips, in the order of their table, that have ``problem``.

    Args:
        window: the model's window in seconds.
        dataset, language: from the settings, for the suggested command.
    """
    names = list_clips(clips)
    hint = "divide them (data segment), set long_audio = cut or skip"
    if "window" in problem and window < PUBLISHED_WINDOW:
        options = ["--dataset", shlex.quote(dataset), *(["--language", language] if language else [])]
        command = program("distributed-train", LONG_WINDOW_PROFILE, *options)
        hint += f", or take a model that hears more ({span_text(PUBLISHED_WINDOW)}): {command}"
    return BadInput(f"{counted(len(clips), 'clip')} {problem}: {names}", hint)


def list_clips(clips: Sequence[Clip]) -> str:
    """Return ids and locations of the first three clips."""
    return ", ".join(f"{clip.id} ({clip.location})" for clip in clips[:3]) + (", ..." if len(clips) > 3 else "")


def too_long_for(window: float) -> str:
    """Return the description of clips longer than the model's window."""
    return f"longer than the model's window of {span_text(window)}"
