"""The kinds of sources: recognised by what lies there, or named by a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from profiles.errors import BadInput
from training.recordings import corpora, readers
from training.recordings.recording import Recording, Request
from training.tasks.speech_dataset import looks_like_path

READERS: dict[str, Callable[[Request], Iterator[Recording]]] = {
    "table": readers.read_tables,
    "audiofolder": readers.read_audiofolder,
    "common-voice": corpora.read_common_voice,
    "librispeech": corpora.read_librispeech,
    "voxpopuli": corpora.read_voxpopuli,
    "nemo": corpora.read_nemo,
    "hub": readers.read_hub,
    "bigquery": readers.read_bigquery,
}
_FOLDERS: dict[str, Callable[[Path], object]] = {
    "common-voice": corpora.is_common_voice,
    "voxpopuli": corpora.voxpopuli_tables,
    "audiofolder": readers.metadata_of,
    "table": readers.tables_of,
    "librispeech": lambda folder: next(corpora.librispeech_transcripts(folder), None),
}
"""What tells a folder of a kind, in the order in which they are tried."""
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
    if named and named not in READERS:
        raise BadInput(f"no kind {named!r} of source", f"known: {', '.join(READERS)}")
    path = Path(source).expanduser()
    is_elsewhere = named in ("hub", "bigquery") if named else source.startswith(readers.BIGQUERY)
    must_be_here = named or looks_like_path(source) or path.suffix.lower() in readers.ENDINGS
    if not is_elsewhere and must_be_here and not path.exists():
        raise BadInput(f"source {source}: not there", _GIVE)
    if named or is_elsewhere:
        return named or "bigquery"
    if path.is_dir():
        return _kind_of_folder(path)
    return _kind_of_file(path) if path.is_file() else "hub"


def _kind_of_file(path: Path) -> str:
    if corpora.is_nemo(path):
        return "nemo"
    if path.suffix.lower() in readers.ENDINGS:
        return "table"
    raise BadInput(f"source {path}: not a table by its name", f"known endings: {', '.join(readers.ENDINGS)}; or --kind")


def _kind_of_folder(folder: Path) -> str:
    found = next((kind for kind, is_one in _FOLDERS.items() if is_one(folder)), None)
    if found is None:
        hint = f"known: tables ({', '.join(readers.ENDINGS)}), metadata.csv, *.trans.txt, asr_train.tsv, Common Voice"
        raise BadInput(f"source {folder}: nothing there has a known form", hint)
    return found
