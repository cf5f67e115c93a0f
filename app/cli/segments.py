"""The body of ``segment``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.models import ModelRequest, only_data_on_stdout
from app.console import command_line, duration_text, say, say_error, show_json, show_line, visible
from app.progress import PlainProgress
from app.run_state import RunState
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode
from training.events import ProgressEvent
from training.runs import find_model

if TYPE_CHECKING:
    from training.recordings.segments.cutting import SegmentOptions
    from training.recordings.segments.dataset import Outcome, Source
    from training.recordings.segments.hearing import Hearer


def segment_command(
    request: ModelRequest, recording: Path, transcript: Path | None, out: Path, options: SegmentOptions
) -> ExitCode:
    """Make a data set folder of long recordings.

    Raises:
        BadInput: recording, transcript, model or folder cannot be used.
    """
    with only_data_on_stdout():
        from training.recordings.segments.dataset import segment_all, sources_of
        from training.tasks.whisper.languages import language_code

    language = language_code(request.language) if request.language else ""

    out = out.expanduser()
    sources = sources_of(recording.expanduser(), transcript)
    model = _model(request, sources, options.draft)

    @cache
    def hear() -> Hearer:
        from training.recordings.segments.hearing import Hearer  # imports torch

        say(f"listening with {model}")
        return Hearer(model, request.device, language)

    with PlainProgress(f"segmenting {recording}", RunState()) as progress, only_data_on_stdout():
        outcomes = segment_all(
            sources,
            out,
            model,
            hear,
            language,
            options,
            lambda name: (
                lambda phase, done, total: progress(ProgressEvent(phase=f"{name}: {phase}", done=done, total=total))
            ),
        )
    return _told(outcomes, out, request.as_json)


def _model(request: ModelRequest, sources: Sequence[Source], draft: bool) -> str:
    """Return the model's folder; nothing where nothing is to be heard."""
    if not draft and not any(source.transcript for source in sources):
        return ""
    if not request.reference:
        raise BadInput("no model to align the text with", "add --model MODEL: any Whisper folder, a run or a profile")
    return str(find_model(request.output, request.reference))


def _told(outcomes: Sequence[Outcome], out: Path, as_json: bool) -> ExitCode:
    clips = sum(one.clips for one in outcomes)
    broken = [one for one in outcomes if one.error]
    code = ExitCode.BAD_INPUT if broken or not clips else ExitCode.DONE
    for one in broken:
        say_error(f"{one.name}: {one.error}")
    if not clips:
        say_error("no clip was kept", f"see {out / 'left_out.csv'}")
    if as_json:
        show_json({"folder": str(out), "recordings": [asdict(one) for one in outcomes], "exit_code": int(code)})
        return code
    for one in outcomes:
        if not one.error:
            for line in _lines(one):
                show_line(line)
    if clips:
        show_line(f"{out}: {counted(clips, 'clip')} in train.csv; what was left out, and why: left_out.csv")
        show_line(f"next: {command_line('distributed-train', 'whisper-tiny-lora', '--dataset', str(out))}")
    return code


def _lines(one: Outcome) -> list[str]:
    length = f"{duration_text(one.clip_seconds)} of {duration_text(one.seconds)}"
    lines = [f"{visible(one.name)}: {counted(one.clips, 'clip')}, {length}"]
    if one.transcript_words:
        share = one.given_words / one.transcript_words
        lines.append(f"  {share:.1%} of the transcript's {one.transcript_words} words are in the clips")
    lines += [f"  left out: {count} x {visible(reason)}" for reason, count in (one.reasons or {}).items()]
    return lines
