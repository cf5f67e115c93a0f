"""``transcribe``: use what a run has made."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.console import say, say_error, show_json, show_line, visible
from app.microphone import recorded
from app.transcript_files import FORMATS, TranscriptFolder, chosen_formats, document
from profiles.errors import ExitCode
from training.runs import find_model

if TYPE_CHECKING:
    from training.tasks.whisper.transcription import Transcript


@dataclass(frozen=True)
class ModelRequest:
    """Which model, where, and how the result is wanted."""

    output: Path
    reference: str
    device: str = "auto"
    language: str = ""
    prompt: str = ""
    """Text that the decoder takes as said before."""
    timestamps: bool | None = None
    """``None``: as the model was saved."""
    as_json: bool = False


@dataclass(frozen=True)
class Writing:
    """What becomes of transcripts."""

    formats: tuple[str, ...] = ()
    folder: Path | None = None
    """``None``: they go to the screen."""
    overwrite: bool = False


def transcribe_command(
    request: ModelRequest, files: Sequence[Path], writing: Writing = Writing(), listen: float = 0.0
) -> ExitCode:
    """Write down what is said in ``files``, or into the microphone for so many seconds.

    Unreadable files are named, the others go on.

    Raises:
        BadInput: the model cannot be found or used, a format is unknown, or a file would be overwritten.
    """
    model = find_model(request.output, request.reference)
    formats = chosen_formats(writing.formats, writing.folder is not None)
    if not listen:
        return _transcribe(model, request, files, formats, writing)
    with recorded(listen) as file:
        return _transcribe(model, request, [file], formats, writing)


def _transcribe(
    model: Path, request: ModelRequest, files: Sequence[Path], formats: Sequence[str], writing: Writing
) -> ExitCode:
    folder = TranscriptFolder(writing.folder, files, formats, writing.overwrite) if writing.folder else None
    if not request.as_json:
        say(f"listening with {model}")  # loading takes seconds, and which run a profile means is worth knowing
    found, code = [], ExitCode.DONE
    for transcript in _heard(model, files, request, bool({*formats} - {"txt"})):
        found.append(document(transcript))
        if transcript.error:
            code = ExitCode.BAD_INPUT
        if transcript.error and not request.as_json:
            say_error(f"{transcript.file}: {transcript.error}")
        if folder is not None and not transcript.error:
            written = folder.write(transcript)
            found[-1]["written"] = [str(path) for path in written]
            say(f"{visible(transcript.file)}: {', '.join(path.name for path in written)}")
        elif not transcript.error and not request.as_json:
            _show(transcript, formats)
    if request.as_json:
        show_json({"model": str(model), "transcripts": found, "exit_code": int(code)})
    return code


def _show(transcript: Transcript, formats: Sequence[str]) -> None:
    if not formats:
        show_line(f"{visible(transcript.file)}: {visible(transcript.text)}")
    for name in formats:
        for line in FORMATS[name](transcript).rstrip("\n").split("\n"):
            show_line(line)


def _heard(model: Path, files: Sequence[Path], request: ModelRequest, times_wanted: bool) -> Iterator[Transcript]:
    with only_data_on_stdout():
        from training.tasks.whisper.transcription import TranscriptionOptions, transcribe  # imports torch

        options = TranscriptionOptions(request.language, request.prompt, request.timestamps, times_wanted)
        heard = transcribe(model, files, request.device, options)
    while True:
        with only_data_on_stdout():
            transcript = next(heard, None)
        if transcript is None:
            return
        yield transcript


@contextlib.contextmanager
def only_data_on_stdout() -> Iterator[None]:
    """Let whatever libraries print go to stderr, and keep their advice to programmers from a person."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield
