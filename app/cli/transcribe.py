"""``transcribe``: what is said in sound files, or into a microphone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, ModelReference, Output, Prompt, Timestamps
from app.cli.terminal import only_data_on_stdout
from app.console import say, say_error, show_json, show_line, visible
from app.microphone import recorded
from app.transcript_files import FORMATS, TranscriptFolder, chosen_formats, document
from profiles.errors import BadInput, ExitCode
from training.runs import find_model

if TYPE_CHECKING:
    from training.tasks.whisper.transcription import Transcript


def transcribe(
    model: ModelReference,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Sound files.")] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="NAME", help="txt, srt, vtt or json; several with commas.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the files; default: the screen.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    microphone: Annotated[
        float, typer.Option("--microphone", metavar="SECONDS", help="Record from this machine's microphone.")
    ] = 0.0,
    language: Language = "",
    prompt: Prompt = "",
    timestamps: Timestamps = None,
    device: Device = "auto",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Write down what is said; unreadable files are named, the others go on.

    Raises:
        BadInput: the model cannot be found or used, a format is unknown, or a file would be overwritten.
    """
    if bool(files) == bool(microphone):
        raise BadInput("no recording was named", "name sound files, or --microphone SECONDS")
    path = find_model(output, model)
    wanted = chosen_formats(formats or (), out is not None)
    with recorded(microphone) if microphone else contextlib.nullcontext() as sound:
        named = [sound] if sound else files or []
        folder = TranscriptFolder(out, named, wanted, overwrite) if out else None
        if not as_json:
            say(f"listening with {path}")  # loading takes seconds, and which run a profile means is worth knowing
        options = {"language": language, "prompt": prompt, "timestamps": timestamps}
        heard = _heard(path, named, device, times_wanted=bool({*wanted} - {"txt"}), **options)
        return _tell(path, heard, wanted, folder, as_json)


def _heard(model: Path, files: Sequence[Path], device: str, **options: Any) -> Iterator[Transcript]:
    with only_data_on_stdout():
        from training.tasks.whisper.transcription import TranscriptionOptions, transcribe  # imports torch

        heard = transcribe(model, files, device, TranscriptionOptions(**options))
    while True:
        with only_data_on_stdout():
            transcript = next(heard, None)
        if transcript is None:
            return
        yield transcript


def _tell(
    model: Path, heard: Iterable[Transcript], formats: Sequence[str], folder: TranscriptFolder | None, as_json: bool
) -> ExitCode:
    found, code = [], ExitCode.DONE
    for transcript in heard:
        found.append(document(transcript))
        if transcript.error:
            code = ExitCode.BAD_INPUT
            if not as_json:
                say_error(f"{transcript.file}: {transcript.error}")
        elif folder is not None:
            written = folder.write(transcript)
            found[-1]["written"] = [str(path) for path in written]
            say(f"{visible(transcript.file)}: {', '.join(path.name for path in written)}")
        elif not as_json:
            _show(transcript, formats)
    if as_json:
        show_json({"model": str(model), "transcripts": found, "exit_code": int(code)})
    return code


def _show(transcript: Transcript, formats: Sequence[str]) -> None:
    if not formats:
        show_line(f"{visible(transcript.file)}: {visible(transcript.text)}")
    for name in formats:
        for line in FORMATS[name](transcript).rstrip("\n").split("\n"):
            show_line(line)
