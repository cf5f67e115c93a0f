"""``transcribe``: use what a run has made."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.console import say, say_error, show_json, show_line, visible
from profiles.errors import ExitCode
from training.runs import find_model


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


def transcribe_command(request: ModelRequest, files: Sequence[Path]) -> ExitCode:
    """Write down what is said in ``files``; unreadable ones are named, the others go on.

    Raises:
        BadInput: the model cannot be found or used.
    """
    model = find_model(request.output, request.reference)
    transcripts = []
    if not request.as_json:
        say(f"listening with {model}")  # loading takes seconds, and which run a profile means is worth knowing
    with only_data_on_stdout():
        from training.tasks.transcription import transcribe  # imports torch

        heard = transcribe(model, files, device=request.device, language=request.language)
    while True:
        with only_data_on_stdout():
            transcript = next(heard, None)
        if transcript is None:
            break
        transcripts.append(transcript)
        if transcript.error and not request.as_json:
            say_error(f"{transcript.file}: {transcript.error}")
        elif not request.as_json:
            show_line(f"{visible(transcript.file)}: {visible(transcript.text)}")
    code = ExitCode.BAD_INPUT if any(transcript.error for transcript in transcripts) else ExitCode.DONE
    if request.as_json:
        found = [{"file": str(t.file), "text": t.text, "seconds": t.seconds, "error": t.error} for t in transcripts]
        show_json({"model": str(model), "transcripts": found, "exit_code": int(code)})
    return code


@contextlib.contextmanager
def only_data_on_stdout() -> Iterator[None]:
    """Let whatever libraries print go to stderr, and keep their advice to programmers from a person."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield
