"""What ``prepare`` shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from app.console import command_line, say, show_json, show_line, visible
from app.progress import PlainProgress
from app.run_state import RunState
from profiles.counts import counted
from profiles.errors import ExitCode
from training.events import ProgressEvent
from training.recordings.hearing import Ear
from training.recordings.preparing import Job, prepare
from training.recordings.workplace import LEFT_OUT, Result

_PROFILE = "whisper-tiny-lora"


def prepare_command(job: Job, model: str, output: Path, device: str, as_json: bool) -> ExitCode:
    """Prepare a data set and say what became of the recordings.

    Args:
        model: folder, run or hub name of the model that checks languages; empty: none does.

    Raises:
        BadInput: source, folder or model cannot be used, or nothing is left.
        StoppedByUser: Ctrl-C.
    """
    ear = _ear(model, output, device) if model else None
    with PlainProgress(f"preparing {visible(job.request.source)}", RunState()) as progress:
        result = prepare(
            job, lambda phase, done, total: progress(ProgressEvent(phase=phase, done=done, total=total)), ear
        )
    if as_json:
        show_json({**dataclasses.asdict(result), "next": _next(result), "exit_code": 0})
    else:
        _show(result)
    return ExitCode.DONE


def _ear(model: str, output: Path, device: str) -> Ear:
    from training.tasks.whisper.spoken_languages import ModelEar  # imports torch

    return ModelEar(model, output, device)


def _show(result: Result) -> None:
    for split, size in result.splits.items():
        speakers = f", {counted(size.speakers, 'speaker')}" if size.speakers else ""
        show_line(
            f"{split:10} {size.clips:6} {'clip' if size.clips == 1 else 'clips'}, {size.hours * 60:.1f} min{speakers}"
        )
    total = sum(result.left_out.values())
    if total:
        show_line(f"left out   {total:6}, each with its reason in {result.folder / LEFT_OUT}")
    for reason, count in result.left_out.items():
        show_line(f"  {count:6} {reason}, such as {visible(result.examples[reason])}")
    for note in result.notes:
        say(f"note: {visible(note)}")
    if result.may_pass:
        say(f"note: {result.may_pass} could not be downloaded; the same command tries them again")
    show_line(f"next: {_next(result)}")


def _next(result: Result) -> str:
    return command_line("distributed-train", _PROFILE, "--dataset", str(result.folder))
