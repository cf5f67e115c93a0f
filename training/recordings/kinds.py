"""The kinds of sources: recognised by what lies there, or named by a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from profiles.errors import BadInput
from training.recordings.readers import (
    audiofolder,
    bigquery,
    common_voice,
    hub,
    librispeech,
    nemo,
    table,
    voxpopuli,
)
from training.recordings.recording import Recording, Request
from training.tasks.speech_dataset import looks_like_path

Reader = Callable[[Request], Iterator[Recording]]

READERS: dict[str, Reader] = {
    "table": table.read,
    "audiofolder": audiofolder.read,
    "common-voice": common_voice.read,
    "librispeech": librispeech.read,
    "voxpopuli": voxpopuli.read,
    "nemo": nemo.read,
    "hub": hub.read,
    "bigquery": bigquery.read,
}

_GIVE = "name a table, a folder or a data set"


def kind_of(source: str, named: str = "") -> str:
    """Return the kind of a source.

    Args:
        named: the kind as a person gave it; empty: it is recognised.

    Raises:
        BadInput: there is no such kind, or nothing at ``source``, or nothing that is known.
    """
    if not source:
        raise BadInput("no source was given", _GIVE)
    if named:
        if named not in READERS:
            raise BadInput(f"no kind {named!r} of source", f"known: {', '.join(READERS)}")
        if named not in ("hub", "bigquery"):
            _refuse_missing(source)
        return named
    if source.startswith(bigquery.PREFIX):
        return "bigquery"
    path = Path(source).expanduser()
    if path.is_dir():
        return _kind_of_folder(path)
    if path.is_file():
        return _kind_of_file(path)
    if looks_like_path(source) or path.suffix.lower() in table.ENDINGS:
        _refuse_missing(source)
    return "hub"


def _refuse_missing(source: str) -> None:
    if not Path(source).expanduser().exists():
        raise BadInput(f"source {source}: not there", _GIVE)


def _kind_of_file(path: Path) -> str:
    if nemo.is_one(path):
        return "nemo"
    if path.suffix.lower() in table.ENDINGS:
        return "table"
    raise BadInput(f"source {path}: not a table by its name", f"known endings: {', '.join(table.ENDINGS)}; or --kind")


def _kind_of_folder(folder: Path) -> str:
    if common_voice.is_one(folder):
        return "common-voice"
    if voxpopuli.tables_of(folder):
        return "voxpopuli"
    if audiofolder.metadata_of(folder):
        return "audiofolder"
    if table.tables_of(folder):
        return "table"
    if next(librispeech.transcripts(folder), None) is not None:
        return "librispeech"
    hint = f"known: tables ({', '.join(table.ENDINGS)}), metadata.csv, *.trans.txt, asr_train.tsv, Common Voice"
    raise BadInput(f"source {folder}: nothing there has a known form", hint)
