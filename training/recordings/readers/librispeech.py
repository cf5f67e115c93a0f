"""LibriSpeech: ``SUBSET/SPEAKER/CHAPTER/`` with ``SPEAKER-CHAPTER.trans.txt`` and FLAC files (openslr.org/12)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiles.errors import BadInput
from training.recordings.places import located
from training.recordings.readers.cells import split_named
from training.recordings.recording import Recording, Request, one_line

_ENDING = ".trans.txt"
_DEPTHS = ("*/*", "*/*/*", "*/*/*/*")  # a subset, the folder with the subsets, the folder around that


def read(request: Request) -> Iterator[Recording]:
    """Give the recordings of all subsets in the folder; its texts are in capitals, and stay so.

    Raises:
        BadInput: a transcript file cannot be read.
    """
    folder = Path(request.source).expanduser()
    for file in transcripts(folder):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{file}: cannot be read: {error}", "unpack the archive again") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _recording(file, number, line, request)


def transcripts(folder: Path) -> Iterator[Path]:
    """Return the transcript files, in order; none if this is no LibriSpeech."""
    for depth in _DEPTHS:
        yield from sorted(folder.glob(f"{depth}/*{_ENDING}"))


def _recording(file: Path, number: int, line: str, request: Request) -> Recording:
    name, _, text = line.strip().partition(" ")
    chapter = file.parent
    where = f"{file}, line {number}"
    split = split_named(chapter.parent.parent.name.partition("-")[0])  # train-clean-100, dev-other, test-clean
    audio, fault = located(f"{name}.flac", chapter, request.roots)
    return Recording(name, audio, one_line(text), where, chapter.parent.name, "en", split, fault=fault)
