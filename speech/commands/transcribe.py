"""``transcribe``: transcripts of sound files or the microphone as text, subtitles (SubRip, WebVTT) or JSON."""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, Output, Prompt, Timestamps, Together
from app.cli.model.serve import loaded
from app.cli.terminal import answer, only_data_on_stdout
from app.console import say, say_error, show_line, visible
from profiles.errors import BadInput, ExitCode
from speech.data.sound_containers import SOUND_ENDINGS
from speech.microphone import recorded
from training.records.model_folders import base_model, find_usable_model, is_speech_model
from training.records.run_files import check_writable, explain_errors, write_atomically

if TYPE_CHECKING:
    from speech.whisper.transcription import TranscriptionResult


def transcribe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, run id, profile (its newest run) or hub name; default: the newest run's.",
        ),
    ] = "",
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Sound files.")] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="NAME", help="txt, srt, vtt or json; several separated by commas."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the files; default: the screen.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    microphone: Annotated[float, typer.Option(metavar="SECONDS", help="Record from this machine's microphone.")] = 0.0,
    compare: Annotated[bool, typer.Option("--compare", help="First show what the base model hears.")] = False,
    language: Language = "",
    prompt: Prompt = "",
    timestamps: Timestamps = None,
    device: Device = "auto",
    local: Together = 1,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Transcribe; files that cannot be read completely are named, and the others still transcribed.

    Raises:
        BadInput: the model cannot be found or used, a format is unknown, or a file would be overwritten.
    """
    if Path(model).is_file():  # MODEL was left out
        model, files = "", [Path(model), *(files or ())]
    if bool(files) == bool(microphone):
        is_file = Path(model).suffix.lower() in SOUND_ENDINGS
        if is_file and not files:
            raise BadInput(f"{visible(model)}: no such file", "check the path")
        raise BadInput("no recording was named", "name sound files, or --microphone SECONDS")
    path = find_usable_model(output, model, is_speech_model)
    _check_sound(files or ())  # before the model is loaded for nothing
    models = [*([base_model(path)] if compare else []), str(path)]
    if compare and out:
        raise BadInput("--compare shows the texts of both models and writes no files", "leave out --out")
    chosen = chosen_formats(formats or (), out is not None)
    with recorded(microphone) if microphone else contextlib.nullcontext() as sound:
        recordings = [sound] if sound else files or []
        folder = TranscriptFolder(out, recordings, chosen, overwrite) if out else None
        options: dict[str, Any] = {"language": language, "prompt": prompt, "timestamps": timestamps, "workers": local}
        options["prefer_timestamps"] = bool({*chosen} - {"txt"})
        answers = []
        for number, name in enumerate(models):
            if compare and not as_json:
                show_line(f"{('before', 'after')[number]}: {visible(name)}")
            else:
                say(f"listening with {visible(name)}")  # loading takes seconds, and it tells which run a profile means
            answers.append(_tell(_heard(name, recordings, device, **options), chosen, folder, as_json))
        documents = [{"model": name, "transcripts": heard} for name, heard in zip(models, answers, strict=True)]
        base = {"base": documents[0]} if compare else {}
        damaged = any(heard["error"] for heard in answers[-1])
        code = ExitCode.BAD_INPUT if damaged else ExitCode.DONE
        return answer(as_json, {**documents[-1], **base}, (), code)


def _check_sound(files: Sequence[Path]) -> None:
    """Check that one of the files can be opened.

    Raises:
        BadInput: none can.
    """
    if files and not any(file.exists() for file in files):
        raise BadInput(f"{visible(files[0])}: no such file", "check the path")
    if files and len(damage := list(_unreadable(files))) == len(files):
        raise BadInput(damage[0])


def _unreadable(files: Iterable[Path]) -> Iterator[str]:
    """Yield why files cannot be opened, up to the first that can be."""
    with only_data_on_stdout():
        from speech.data.sound_file import AudioError, SoundFile  # imports FFmpeg's libraries

    for file in files:
        try:
            SoundFile(file).close()
        except AudioError as error:
            yield f"{visible(file)}: {error}"
        else:
            return


def _heard(model: str, files: Sequence[Path], device: str, **options: Any) -> Iterator[TranscriptionResult]:
    with only_data_on_stdout():
        from speech.whisper.transcription import TranscriptionOptions, load_transcriber  # imports torch

        transcripts = loaded(load_transcriber, model, device, TranscriptionOptions(**options))(files)
    while True:
        with only_data_on_stdout():
            transcript = next(transcripts, None)
        if transcript is None:
            return
        yield transcript


def _tell(
    transcripts: Iterable[TranscriptionResult], formats: Sequence[str], folder: TranscriptFolder | None, as_json: bool
) -> list[dict[str, Any]]:
    """Write transcripts as they come; return their documents."""
    documents = []
    for transcript in transcripts:
        documents.append(document(transcript) | ({"normalised": _normalised(transcript)} if as_json else {}))
        if transcript.error:
            if not as_json:
                say_error(f"{visible(transcript.file)}: {transcript.error}")
            if not transcript.segments:
                continue
        if folder is not None:
            written = folder.write(transcript)
            documents[-1]["written"] = [str(path) for path in written]
            say(f"{visible(transcript.file)}: {', '.join(path.name for path in written)}")
        elif not as_json and not formats:
            show_line(f"{visible(transcript.file)}: {visible(transcript.text)}")
        elif not as_json:
            for line in (line for name in formats for line in FORMATS[name](transcript).rstrip("\n").split("\n")):
                show_line(line)
    return documents


def _normalised(transcript: TranscriptionResult) -> str:
    """Return the text as error rates compare it."""
    with only_data_on_stdout():
        from speech.scoring.word_errors import normalizer_for  # imports transformers

        return normalizer_for(transcript.language or "en")(transcript.text)


# ---------------------------------------------------------------------------------------------------------- transcripts


def _timed_texts(transcript: TranscriptionResult) -> list[tuple[float, float, str]]:
    """Return start, end and text of each segment, and finally a note if the recording could not be read further."""
    spans = [(segment.start, segment.end, segment.text) for segment in transcript.segments]
    if transcript.error:
        end = spans[-1][1] if spans else 0.0
        spans.append(
            (end, max(transcript.seconds, end + _MARK_SECONDS), f"[cannot be read further: {transcript.error}]")
        )
    return spans


def _srt(transcript: TranscriptionResult) -> str:
    cues = (
        f"{number}\n{clock(start, ',')} --> {clock(end, ',')}\n{_cue(text)}\n\n"
        for number, (start, end, text) in enumerate(_timed_texts(transcript), 1)
    )
    return "".join(cues)


def _vtt(transcript: TranscriptionResult) -> str:
    cues = (
        f"{clock(start)} --> {clock(end)}\n{html.escape(_cue(text), quote=False)}\n\n"
        for start, end, text in _timed_texts(transcript)
    )
    return "WEBVTT\n\n" + "".join(cues)


_MARK_SECONDS = 3.0
"""Minimum display time of the note at the end of a damaged recording."""
FORMATS: Mapping[str, Callable[[TranscriptionResult], str]] = {
    "txt": lambda transcript: "".join(f"{visible(text)}\n" for _, _, text in _timed_texts(transcript)),
    "srt": _srt,
    "vtt": _vtt,
    "json": lambda transcript: json.dumps(document(transcript), ensure_ascii=False, indent=1) + "\n",
}


def document(transcript: TranscriptionResult) -> dict[str, Any]:
    """Return a transcript as a JSON document; times in seconds."""
    segments = [
        {**asdict(segment), "start": round(segment.start, 2), "end": round(segment.end, 2)}
        for segment in transcript.segments
    ]
    header = {"file": str(transcript.file), "text": transcript.text, "seconds": transcript.seconds}
    return {**header, "language": transcript.language, "segments": segments, "error": transcript.error}


def clock(seconds: float, point: str = ".") -> str:
    """``01:02:03.450``: hours, minutes, seconds and thousandths."""
    thousandths = round(seconds * 1000)
    minutes, remainder = divmod(thousandths, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{remainder // 1000:02d}{point}{remainder % 1000:03d}"


def _cue(text: str) -> str:
    """Return a text as one line that no player mistakes for a timing line."""
    return visible(text).replace("-->", "->")


def chosen_formats(requested: Sequence[str], to_files: bool) -> list[str]:
    """Return the requested formats, given separately or separated by commas.

    Raises:
        BadInput: one is unknown, or several are to go to the screen.
    """
    names = list(dict.fromkeys(name.strip().lower() for text in requested for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise BadInput(f"format {unknown[0]!r} is unknown", f"it is one of: {', '.join(FORMATS)}")
    if len(names) > 1 and not to_files:
        raise BadInput("only one format fits on the screen", "add --out DIR")
    return names or (["txt"] if to_files else [])


class TranscriptFolder:
    """Output folder of transcripts; existing files are not overwritten unless requested.

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
        existing = [path for file in self._names for path in self._paths(file) if path.exists()]
        if existing and not overwrite:
            raise BadInput(f"{existing[0]} is there already", "add --overwrite, or choose another folder")
        check_writable(folder, "--out")

    def _paths(self, file: Path) -> list[Path]:
        return [self._folder / f"{self._names[file]}.{name}" for name in self._formats]

    def write(self, transcript: TranscriptionResult) -> list[Path]:
        """Write a transcript in every format, each file atomically; return the paths.

        Raises:
            BadInput: one cannot be written.
        """
        paths = self._paths(transcript.file)
        for name, path in zip(self._formats, paths, strict=True):
            with explain_errors(path, "--out"):
                write_atomically(path, FORMATS[name](transcript).encode("utf-8", "replace"), 0o644)
        return paths
