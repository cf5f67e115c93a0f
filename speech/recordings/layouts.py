"""Readers of folder layouts whose tables have no header: LJSpeech, Kaldi, MLS, FLEURS, and pairs of sound and text.

Each ``read_*`` yields the recordings of a folder; the function that recognises such a folder follows it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from speech.data.language_codes import code_of
from speech.data.sound_containers import SOUND_ENDINGS
from speech.data.speech_clips import COLUMNS
from speech.recordings.recording import (
    LONGEST_ID,
    Exclusion,
    ExclusionReason,
    MissingSource,
    ReadRequest,
    Recording,
    locate_audio,
    one_line,
)
from speech.scoring.text_normalisation import fold
from training.tasks.data_files.plain_text import plain_text
from training.tasks.data_files.splits import split_named, without_hidden
from training.tasks.data_files.tables import check_size, read_text

_TEXTS = (".txt", ".lab")
_SAMPLES = re.compile(r"^0 \d{4,} (?=\D)")
"""Prefix of a text in TIMIT: first and last sample."""
_LARGEST = 2**30  # bytes: a file of transcripts is read at once
_LJSPEECH = ("metadata.csv", "metadata.txt", "transcript.txt", "filelist.txt")


def read_ljspeech(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of a table without header, ``ID|text|normalised text`` as in LJSpeech, or
    ``FILE|speaker|text`` or ``FILE|speaker|language|text``, next to ``wavs/``. The text is not the normalised one.

    Raises:
        BadInput: the table cannot be read.
    """
    folder = Path(request.source).expanduser()
    for path in ljspeech_tables(folder):
        rows = _without_lengths(list(_fields(path, "|")))
        form = _fields_before_text([fields for _, fields in rows])
        for location, fields in rows:
            audio, exclusion = locate_audio(fields[0], folder, request.roots)
            if form != "language" and len(fields) > 3:
                detail = f"{len(fields)} fields, and ID|text|normalised text are 3: a text holds no bar"
                exclusion = Exclusion(ExclusionReason.BAD_CELL, detail)
            speaker = fields[1] if form else ""
            language = code_of(fields[2]) or fields[2].lower() if form == "language" else ""
            text = fields[3] if form == "language" else fields[2] if form else next(filter(None, fields[1:]), "")
            yield Recording(_identity(fields[0]), audio, _text(text), location, speaker, language, exclusion=exclusion)


def _without_lengths(rows: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Drop the last field if it is the clip's length in every row, as in CSS10."""
    if not all(len(fields) > 3 and re.fullmatch(r"\d+\.\d+", fields[-1]) for _, fields in rows):
        return rows
    return [(location, fields[:-1]) for location, fields in rows]


def _fields_before_text(rows: list[list[str]]) -> str:
    """Return the last field before the text: ``language`` (after a speaker), ``speaker``, or neither (empty)."""
    if not all(len(fields) > 2 and fields[1] and not re.search(r"\s", fields[1]) for fields in rows):
        return ""
    if all(len(fields) > 3 and re.fullmatch("[A-Za-z]{2,3}", fields[2]) for fields in rows):
        return "language"  # phonemes may follow the text
    # equal fields are a text and its normalised form
    return "" if any(fold(fields[1]) == fold(fields[2]) for fields in rows) else "speaker"


def ljspeech_tables(folder: Path) -> list[Path]:
    """Return the table of a folder in the form of LJSpeech, as a list: one of its usual names, or the only text file;
    empty if there is none."""
    texts = list(folder.glob("*.txt"))
    for path in [*(folder / name for name in _LJSPEECH), *(texts if len(texts) == 1 else ())]:
        fields = _first_line(path).split("|")
        if len(fields) > 1 and not {field.strip().casefold() for field in fields}.intersection(COLUMNS):
            return [path]
    return []


def read_kaldi(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of Kaldi's data folders: ``wav.scp`` and ``text``, and ``segments`` and ``utt2spk`` if they
    exist. Commands in ``wav.scp`` are not run.

    Raises:
        BadInput: a file cannot be read.
    """
    source = Path(request.source).expanduser()
    for folder in kaldi_folders(source):
        sounds, speakers = _pairs(folder / "wav.scp"), _pairs(folder / "utt2spk")
        cuts = {name: value.split() for name, value in _pairs(folder / "segments").items()}
        split = _split_in(folder.name) if folder != source else ""
        for name, text in _pairs(folder / "text").items():
            sound_name, *times = cuts.get(name, [name])
            location, speaker = f"{folder / 'text'}, {name}", speakers.get(name, "")
            base = Recording(_identity(name), MissingSource(name), _text(text), location, speaker)
            yield replace(_kaldi_recording(base, sounds.get(sound_name, ""), times, folder, request), split=split)


def _kaldi_recording(base: Recording, sound: str, times: list[str], folder: Path, request: ReadRequest) -> Recording:
    if sound.endswith("|"):
        return replace(base, exclusion=Exclusion(ExclusionReason.OUTSIDE, "wav.scp has a command, which is not run"))
    audio, exclusion = locate_audio(sound, folder, request.roots)
    try:
        start, end = map(float, times[:2]) if times else (0.0, -1.0)
    except ValueError:
        start = end = math.nan
    if not (0 <= start < math.inf and math.isfinite(end)):
        return replace(
            base, exclusion=Exclusion(ExclusionReason.BAD_CELL, f"segments: {' '.join(times)[:40]!r} are no times")
        )
    duration = end - start if end > start else None  # an end of -1 is that of the file
    return replace(base, audio=audio, exclusion=exclusion, offset=start, duration=duration)


def kaldi_folders(folder: Path) -> list[Path]:
    """Return Kaldi's data folders: this one, or those in it; empty if there are none."""
    folders = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    return [path for path in folders if (path / "wav.scp").is_file() and (path / "text").is_file()]


def read_mls(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of Multilingual LibriSpeech: ``SPLIT/transcripts.txt`` and ``SPLIT/audio/SPEAKER/BOOK/``.

    Raises:
        BadInput: a file cannot be read.
    """
    for path in mls_transcripts(Path(request.source).expanduser()):
        language = code_of(path.parent.parent.name.removeprefix("mls_").removesuffix("_opus"))
        for location, (name, *text) in _fields(path, "\t"):
            speaker, _, book_and_number = name.partition("_")
            inner = f"audio/{speaker}/{book_and_number.partition('_')[0]}/{name}"
            audio, exclusion = locate_audio(inner, path.parent, request.roots)
            split = split_named(path.parent.name)
            yield Recording(
                _identity(name), audio, _text(" ".join(text)), location, speaker, language, split, exclusion=exclusion
            )


def mls_transcripts(folder: Path) -> list[Path]:
    """Return the transcript files of the splits, or of all languages, in a folder; empty if this is not MLS."""
    paths = (*folder.glob("*/transcripts.txt"), *folder.glob("*/*/transcripts.txt"))
    return sorted(path for path in paths if split_named(path.parent.name))


def read_fleurs(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of FLEURS: ``LANGUAGE/SPLIT.tsv`` without header, and the sound in the same folder. The text
    is not the normalised one.

    Raises:
        BadInput: a table cannot be read.
    """
    for path in fleurs_tables(Path(request.source).expanduser()):
        language = code_of(path.parent.name) or path.parent.name
        for location, fields in _fields(path, "\t"):
            name, text = (*fields[1:3], "", "")[:2]
            candidates = (f"audio/{path.stem}/{name}", f"{path.stem}/{name}", name)
            sounds = [locate_audio(cell, path.parent, request.roots) for cell in candidates]
            audio, exclusion = next((sound for sound in sounds if sound[1] is None), sounds[0])
            identity = _identity(f"{path.stem}/{name}")
            yield Recording(
                identity, audio, _text(text), location, "", language, split_named(path.stem), exclusion=exclusion
            )


def fleurs_tables(folder: Path) -> list[Path]:
    """Return the tables of a folder, or of all languages in it, in the form of FLEURS; empty if this is not FLEURS."""
    paths = sorted([*folder.glob("*.tsv"), *folder.glob("*/*.tsv"), *folder.glob("data/*/*.tsv")])
    return [path for path in paths if split_named(path.stem) and _is_fleurs(_first_line(path).split("\t"))]


def _is_fleurs(fields: list[str]) -> bool:
    return len(fields) >= 6 and fields[0].isdigit() and fields[1].lower().endswith(".wav")


def read_pairs(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings next to a text of the same name (``a.wav`` and ``a.txt`` or ``a.lab``), in all folders of a
    folder. A folder that is named like a split decides the split.

    Raises:
        BadInput: a text cannot be read.
    """
    folder = Path(request.source).expanduser()
    for sound, text in pairs_in(folder):
        name = sound.relative_to(folder).as_posix()
        audio, exclusion = locate_audio(name, folder, request.roots)
        splits = filter(None, map(split_named, Path(name).parts[:-1]))
        yield Recording(
            _identity(name),
            audio,
            _text(_SAMPLES.sub("", _read(text))),
            str(text),
            split=next(splits, ""),
            exclusion=exclusion,
        )


def pairs_in(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield sound files with their text files, sorted by name."""
    files = sorted(without_hidden(folder.rglob("*")))
    texts = {path.with_suffix(path.suffix.lower()): path for path in files if path.suffix.lower() in _TEXTS}
    for sound in (path for path in files if path.suffix.lower() in SOUND_ENDINGS):
        text = next(filter(None, (texts.get(sound.with_suffix(end)) for end in _TEXTS)), None)
        if text is not None:
            yield sound, text


def _pairs(path: Path) -> dict[str, str]:
    """Return the rest of each line by its first word; empty if the file does not exist."""
    lines = _read(path).split("\n") if path.is_file() else []
    split = (line.strip().partition(" ") for line in (line.replace("\t", " ") for line in lines))
    return {name: value.strip() for name, _, value in split if name}


def _fields(path: Path, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the location and the fields of each line that is not empty. Fields are never quoted."""
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
