"""Readers of folders without a header that says what is what: LJSpeech, Kaldi, MLS, FLEURS, and texts beside sounds.

A ``read_*`` gives the recordings of a folder; beside it stands what tells whether a folder is one.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from training.recordings.recording import (
    LONGEST_ID,
    ExclusionReason,
    Fault,
    NoSource,
    ReadRequest,
    Recording,
    located,
    one_line,
)
from training.tasks.language_codes import code_of
from training.tasks.normalising import folded
from training.tasks.sound_containers import SOUND_ENDINGS
from training.tasks.speech_clips import COLUMNS, split_named
from training.tasks.stored_files import without_hidden
from training.tasks.tables import check_size, read_text
from training.tasks.transcript_text import plain_text

_TEXTS = (".txt", ".lab")
_SAMPLES = re.compile(r"^0 \d{4,} (?=\D)")
"""What TIMIT has before a text: first and last sample."""
_LARGEST = 2**30  # bytes: a file of transcripts is read whole
_LJSPEECH = ("metadata.csv", "metadata.txt", "transcript.txt", "filelist.txt")


def read_ljspeech(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings of a table without a first line of names, ``ID|text|normalised text`` as LJSpeech has it, or
    ``FILE|speaker|text`` or ``FILE|speaker|language|text``, beside ``wavs/``. The text is the one as it is written.

    Raises:
        BadInput: the table cannot be read.
    """
    folder = Path(request.source).expanduser()
    for path in ljspeech_tables(folder):
        rows = _without_lengths(list(_fields(path, "|")))
        form = _bar_form([fields for _, fields in rows])
        for where, fields in rows:
            audio, fault = located(fields[0], folder, request.roots)
            if form != "language" and len(fields) > 3:
                detail = f"{len(fields)} fields, and ID|text|normalised text are 3: a text holds no bar"
                fault = Fault(ExclusionReason.BAD_CELL, detail)
            speaker = fields[1] if form else ""
            language = code_of(fields[2]) or fields[2].lower() if form == "language" else ""
            text = fields[3] if form == "language" else fields[2] if form else next(filter(None, fields[1:]), "")
            yield Recording(_identity(fields[0]), audio, _text(text), where, speaker, language, fault=fault)


def _without_lengths(rows: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Leave out a last field that is the clip's length in every row, as in CSS10."""
    if not all(len(fields) > 3 and re.fullmatch(r"\d+\.\d+", fields[-1]) for _, fields in rows):
        return rows
    return [(where, fields[:-1]) for where, fields in rows]


def _bar_form(rows: list[list[str]]) -> str:
    """Return which fields stand before the text: a speaker and a ``language``, a ``speaker``, or neither."""
    if not all(len(fields) > 2 and fields[1] and not re.search(r"\s", fields[1]) for fields in rows):
        return ""
    if all(len(fields) > 3 and re.fullmatch("[A-Za-z]{2,3}", fields[2]) for fields in rows):
        return "language"  # phonemes may follow the text
    # a word that is there twice is a text and its normalised form
    return "" if any(folded(fields[1]) == folded(fields[2]) for fields in rows) else "speaker"


def ljspeech_tables(folder: Path) -> list[Path]:
    """Return the table of a folder as LJSpeech has it, as a list; none if this is none."""
    for path in (folder / name for name in _LJSPEECH):
        fields = _first_line(path).split("|")
        if len(fields) > 1 and not {field.strip().casefold() for field in fields}.intersection(COLUMNS):
            return [path]
    return []


def read_kaldi(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings of data folders of Kaldi: ``wav.scp`` and ``text``, and ``segments`` and ``utt2spk`` where
    they are there. Commands in ``wav.scp`` are not run.

    Raises:
        BadInput: a file cannot be read.
    """
    source = Path(request.source).expanduser()
    for folder in kaldi_folders(source):
        sounds, speakers = _pairs(folder / "wav.scp"), _pairs(folder / "utt2spk")
        parts = {name: value.split() for name, value in _pairs(folder / "segments").items()}
        split = _split_in(folder.name) if folder != source else ""
        for name, text in _pairs(folder / "text").items():
            recording, *times = parts.get(name, [name])
            where, speaker = f"{folder / 'text'}, {name}", speakers.get(name, "")
            base = Recording(_identity(name), NoSource(name), _text(text), where, speaker)
            yield replace(_of_kaldi(base, sounds.get(recording, ""), times, folder, request), split=split)


def _of_kaldi(base: Recording, sound: str, times: list[str], folder: Path, request: ReadRequest) -> Recording:
    if sound.endswith("|"):
        return replace(base, fault=Fault(ExclusionReason.OUTSIDE, "wav.scp has a command, which is not run"))
    audio, fault = located(sound, folder, request.roots)
    try:
        start, end = map(float, times[:2]) if times else (0.0, -1.0)
    except ValueError:
        start = end = math.nan
    if not (0 <= start < math.inf and math.isfinite(end)):
        return replace(base, fault=Fault(ExclusionReason.BAD_CELL, f"segments: {' '.join(times)[:40]!r} are no times"))
    duration = end - start if end > start else None  # an end of -1 is that of the file
    return replace(base, audio=audio, fault=fault, offset=start, duration=duration)


def kaldi_folders(folder: Path) -> list[Path]:
    """Return the data folders of Kaldi: this one, or those in it; none if there are none."""
    folders = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    return [path for path in folders if (path / "wav.scp").is_file() and (path / "text").is_file()]


def read_mls(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings of Multilingual LibriSpeech: ``SPLIT/transcripts.txt`` and ``SPLIT/audio/SPEAKER/BOOK/``.

    Raises:
        BadInput: a file cannot be read.
    """
    for path in mls_transcripts(Path(request.source).expanduser()):
        language = code_of(path.parent.parent.name.removeprefix("mls_").removesuffix("_opus"))
        for where, (name, *text) in _fields(path, "\t"):
            speaker, _, rest = name.partition("_")
            inner = f"audio/{speaker}/{rest.partition('_')[0]}/{name}"
            audio, fault = located(inner, path.parent, request.roots)
            split = split_named(path.parent.name)
            yield Recording(_identity(name), audio, _text(" ".join(text)), where, speaker, language, split, fault=fault)


def mls_transcripts(folder: Path) -> list[Path]:
    """Return the transcripts of the splits in a folder, or of the languages in it; none if this is no MLS."""
    paths = (*folder.glob("*/transcripts.txt"), *folder.glob("*/*/transcripts.txt"))
    return sorted(path for path in paths if split_named(path.parent.name))


def read_fleurs(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings of FLEURS: ``LANGUAGE/SPLIT.tsv`` without a first line of names, with the sound below it. The
    text is the one as it is written.

    Raises:
        BadInput: a table cannot be read.
    """
    for path in fleurs_tables(Path(request.source).expanduser()):
        language = code_of(path.parent.name) or path.parent.name
        for where, fields in _fields(path, "\t"):
            name, text = (*fields[1:3], "", "")[:2]
            tried = (f"audio/{path.stem}/{name}", f"{path.stem}/{name}", name)
            sounds = [located(cell, path.parent, request.roots) for cell in tried]
            audio, fault = next((sound for sound in sounds if sound[1] is None), sounds[0])
            identity = _identity(f"{path.stem}/{name}")
            yield Recording(identity, audio, _text(text), where, "", language, split_named(path.stem), fault=fault)


def fleurs_tables(folder: Path) -> list[Path]:
    """Return the tables of a folder as FLEURS has them, or of the languages in it; none if this is no FLEURS."""
    paths = sorted([*folder.glob("*.tsv"), *folder.glob("*/*.tsv"), *folder.glob("data/*/*.tsv")])
    return [path for path in paths if split_named(path.stem) and _is_fleurs(_first_line(path).split("\t"))]


def _is_fleurs(fields: list[str]) -> bool:
    return len(fields) >= 6 and fields[0].isdigit() and fields[1].lower().endswith(".wav")


def read_pairs(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings that have a text of the same name beside them (``a.wav`` and ``a.txt`` or ``a.lab``), in all
    folders of a folder. One whose parent is named like a split is of that split.

    Raises:
        BadInput: a text cannot be read.
    """
    folder = Path(request.source).expanduser()
    for sound, text in pairs_in(folder):
        name = sound.relative_to(folder).as_posix()
        audio, fault = located(name, folder, request.roots)
        splits = filter(None, map(split_named, Path(name).parts[:-1]))
        yield Recording(
            _identity(name), audio, _text(_SAMPLES.sub("", _read(text))), str(text), split=next(splits, ""), fault=fault
        )


def pairs_in(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield sounds with their texts, by name; none if there are none."""
    files = sorted(without_hidden(folder.rglob("*")))
    texts = {path.with_suffix(path.suffix.lower()): path for path in files if path.suffix.lower() in _TEXTS}
    for sound in (path for path in files if path.suffix.lower() in SOUND_ENDINGS):
        text = next(filter(None, (texts.get(sound.with_suffix(end)) for end in _TEXTS)), None)
        if text is not None:
            yield sound, text


def _pairs(path: Path) -> dict[str, str]:
    """Return what lines hold after their first word, by this; nothing of a file that is not there."""
    lines = _read(path).split("\n") if path.is_file() else []
    split = (line.strip().partition(" ") for line in (line.replace("\t", " ") for line in lines))
    return {name: value.strip() for name, _, value in split if name}


def _fields(path: Path, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields of each line that is not empty, and where it is. Nothing is quoted."""
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", [field.strip() for field in line.rstrip("\r").split(delimiter)]


def _read(path: Path) -> str:
    check_size(path, _LARGEST, "divide it")
    return read_text(path, "save it as UTF-8")


def _identity(name: str) -> str:
    return one_line(name)[-LONGEST_ID:]


def _text(text: str) -> str:
    return one_line(plain_text(unicodedata.normalize("NFC", text)))


def _split_in(name: str) -> str:
    return next(filter(None, map(split_named, re.split(r"[_-]", name))), "")


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.readline(2**16).decode("utf-8-sig", "replace").rstrip("\r\n")
    except OSError:
        return ""
