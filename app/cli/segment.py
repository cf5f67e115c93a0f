"""``segment``: long recordings with their transcripts become clips to train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, Output
from app.cli.terminal import answer, only_data_on_stdout, reporting
from app.console import command_line, duration_text, say, say_error, visible
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from training.recordings.segments.dataset import Outcome
    from training.recordings.segments.hearing import Hearer

_TRANSCRIPT = ".txt, .srt or .vtt; empty: the file beside it of the same name."
_MODEL = "Whisper that aligns the text: a folder, a run or a profile."
_DRAFT = "Without a transcript: use what the model hears, for you to correct."


def segment(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="A sound file, or a folder of them.")],
    transcript: Annotated[Path | None, typer.Argument(metavar="[TRANSCRIPT]", help=_TRANSCRIPT)] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder of the new data set.")] = Path(
        "segments"
    ),
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help=_MODEL)] = "",
    longest: Annotated[float, typer.Option("--longest", metavar="S", min=1, max=30, help="Longest clip.")] = 30.0,
    agreement: Annotated[
        float, typer.Option("--agreement", metavar="SHARE", min=0, max=1, help="Least agreement of text and sound.")
    ] = 0.6,
    draft: Annotated[bool, typer.Option("--draft", help=_DRAFT)] = False,
    language: Language = "",
    device: Device = "auto",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Make a data set folder of long recordings.

    Raises:
        BadInput: recording, transcript, model or folder cannot be used.
    """
    with only_data_on_stdout():
        from training.recordings.segments.cutting import SegmentOptions
        from training.recordings.segments.dataset import segment_all, sources_of
        from training.tasks.whisper.languages import language_code

    language = language_code(language) if language else ""
    out = out.expanduser()
    sources = sources_of(recording.expanduser(), transcript)
    listens = draft or any(source.transcript for source in sources)
    folder = _model(output, model) if listens else ""

    @cache
    def hear() -> Hearer:
        from training.recordings.segments.hearing import Hearer  # imports torch

        say(f"listening with {folder}")
        return Hearer(folder, device, language)

    with reporting(f"segmenting {recording}") as progress:
        outcomes = segment_all(
            sources,
            out,
            folder,
            hear,
            language,
            SegmentOptions(longest, agreement, draft),
            lambda name: lambda phase, done, total: progress(f"{name}: {phase}", done, total),
        )
    return _tell(outcomes, out, as_json)


def _model(output: Path, model: str) -> str:
    from training.runs import find_model

    if not model:
        raise BadInput("no model to align the text with", "add --model MODEL: any Whisper folder, a run or a profile")
    return str(find_model(output, model))


def _tell(outcomes: Sequence[Outcome], out: Path, as_json: bool) -> ExitCode:
    clips = sum(one.clips for one in outcomes)
    broken = [one for one in outcomes if one.error]
    for one in broken:
        say_error(f"{one.name}: {one.error}")
    if not clips:
        say_error("no clip was kept", f"see {out / 'left_out.csv'}")
    lines = [line for one in outcomes if not one.error for line in _lines(one)]
    if clips:
        lines.append(f"{out}: {counted(clips, 'clip')} in train.csv; what was left out, and why: left_out.csv")
        lines.append(f"next: {command_line('distributed-train', 'whisper-tiny-lora', '--dataset', str(out))}")
    document = {"folder": str(out), "recordings": [asdict(one) for one in outcomes]}
    return answer(as_json, document, lines, ExitCode.BAD_INPUT if broken or not clips else ExitCode.DONE)


def _lines(one: Outcome) -> Iterator[str]:
    length = f"{duration_text(one.clip_seconds)} of {duration_text(one.seconds)}"
    yield f"{visible(one.name)}: {counted(one.clips, 'clip')}, {length}"
    if one.transcript_words:
        share = one.given_words / one.transcript_words
        yield f"  {share:.1%} of the transcript's {one.transcript_words} words are in the clips"
    for reason, count in (one.reasons or {}).items():
        yield f"  left out: {count} x {visible(reason)}"
