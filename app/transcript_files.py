"""Transcripts as text, subtitles (SubRip, WebVTT) and JSON, on the screen or in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.console import visible
from profiles.errors import BadInput
from training.run_files import explain, try_to_write, write_whole

if TYPE_CHECKING:
    from training.tasks.whisper.transcription import Transcript


def _txt(transcript: Transcript) -> str:
    return "".join(f"{visible(one.text)}\n" for one in transcript.segments)


def _srt(transcript: Transcript) -> str:
    cues = (
        f"{number}\n{clock(one.start, ',')} --> {clock(one.end, ',')}\n{_cue(one.text)}\n\n"
        for number, one in enumerate(transcript.segments, 1)
    )
    return "".join(cues)


def _vtt(transcript: Transcript) -> str:
    def escaped(text: str) -> str:
        return _cue(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    cues = (f"{clock(one.start)} --> {clock(one.end)}\n{escaped(one.text)}\n\n" for one in transcript.segments)
    return "WEBVTT\n\n" + "".join(cues)


def _json(transcript: Transcript) -> str:
    return json.dumps(document(transcript), ensure_ascii=False, indent=1) + "\n"


FORMATS: Mapping[str, Callable[[Transcript], str]] = {"txt": _txt, "srt": _srt, "vtt": _vtt, "json": _json}


def document(transcript: Transcript) -> dict[str, Any]:
    """Return a transcript for programs; times in seconds."""
    segments = [{**asdict(one), "start": round(one.start, 2), "end": round(one.end, 2)} for one in transcript.segments]
    found = {"file": str(transcript.file), "text": transcript.text, "seconds": transcript.seconds}
    return {**found, "language": transcript.language, "segments": segments, "error": transcript.error}


def clock(seconds: float, point: str = ".") -> str:
    """``01:02:03.450``: hours, minutes, seconds and thousandths."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _cue(text: str) -> str:
    """Return a text in one line that no player takes for a line of times."""
    return visible(text).replace("-->", "->")


def chosen_formats(said: Sequence[str], to_files: bool) -> list[str]:
    """Return the formats that were asked for, each by itself or with commas between.

    Raises:
        BadInput: one is unknown, or several are to go to the screen.
    """
    names = list(dict.fromkeys(name.strip().lower() for one in said for name in one.split(",") if name.strip()))
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise BadInput(f"format {unknown[0]!r} is unknown", f"it is one of: {', '.join(FORMATS)}")
    if len(names) > 1 and not to_files:
        raise BadInput("only one format fits on the screen", "add --out DIR")
    return names or (["txt"] if to_files else [])


class TranscriptFolder:
    """Where the files go; what is there already is not overwritten unasked.

    Raises:
        BadInput: two of the sound files would have one name, a file is there already, or nothing can be written there.
    """

    def __init__(self, folder: Path, files: Sequence[Path], formats: Sequence[str], overwrite: bool) -> None:
        self._formats = formats
        stems = [file.stem for file in files]
        self._names = {file: file.stem if stems.count(file.stem) == 1 else file.name for file in files}
        if len(set(self._names.values())) < len(self._names):
            raise BadInput("two of the sound files have the same name", "transcribe them into folders of their own")
        self._folder = folder
        there = [path for file in self._names for path in self._paths(file) if path.exists()]
        if there and not overwrite:
            raise BadInput(f"{there[0]} is there already", "add --overwrite, or choose another folder")
        try_to_write(folder, "--out")

    def _paths(self, file: Path) -> list[Path]:
        return [self._folder / f"{self._names[file]}.{name}" for name in self._formats]

    def write(self, transcript: Transcript) -> list[Path]:
        """Write a transcript in every format, each file whole or not at all; return the paths.

        Raises:
            BadInput: one cannot be written.
        """
        paths = self._paths(transcript.file)
        for name, path in zip(self._formats, paths, strict=True):
            try:
                write_whole(path, FORMATS[name](transcript).encode("utf-8", "replace"), 0o644)
            except OSError as error:
                raise BadInput(*explain(error, path, "--out")) from error
        return paths
