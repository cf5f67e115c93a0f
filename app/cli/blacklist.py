"""``blacklist``: samples that a model cannot learn, written to a patch file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.arguments import Device, Json, Output
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from training.tasks.blacklist import Bounds, Doubt

SHOWN = 20


def blacklist(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile with runs that are done, or a run.")],
    wer: Annotated[float, typer.Option("--wer", min=0.01, max=10, help="WER from which a sample is wrong.")] = 0.5,
    listens: Annotated[int, typer.Option("--listens", min=1, max=20, help="How often to listen.")] = 3,
    repeated: Annotated[
        int, typer.Option("--repeated", min=0, max=20, help="In how many listens it has to be wrong; 0: in all.")
    ] = 0,
    runs: Annotated[int, typer.Option("--runs", min=1, max=20, help="Newest models of the profile that listen.")] = 1,
    most: Annotated[float, typer.Option("--most", min=0, max=1, help="Share of the samples that may go.")] = 0.05,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, max=1024, help="Clips heard at once.")] = 8,
    device: Device = "auto",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write the list without asking.")] = False,
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Find training samples that a trained model still hears otherwise, and list them to be left out."""
    from app.cli.models import only_data_on_stdout
    from app.console import say, show_json
    from app.progress import PlainProgress
    from app.run_state import RunState
    from training.events import ProgressEvent
    from training.run_folder import RunFolder
    from training.runs import find_models
    from training.tasks.early_look import check_data

    if repeated > listens:
        raise BadInput(f"--repeated {repeated} of {listens} listens cannot be", "raise --listens")
    models = find_models(output, profile, runs)
    settings = RunFolder.open(models[0].parent).plan().profile
    if settings.model.task != "whisper":
        raise BadInput(f"{models[0].parent.name}: task {settings.model.task} hears nothing", "name a Whisper's run")
    check_data(settings)
    with PlainProgress(f"blacklist {profile}", RunState()) as progress, only_data_on_stdout():
        from training.tasks.blacklist import Bounds, choose, listen, plan_listens, write_blacklist
        from training.tasks.speech_dataset import read_tables

        def report(phase: str, done: int, total: int | None) -> None:
            progress(ProgressEvent(phase=phase, done=done, total=total))

        found = listen(settings, plan_listens(models, listens), device, batch_size, report)
    bounds = Bounds(wer, repeated or listens, most)
    data = settings.data
    chosen = choose(found, bounds, read_tables(data.dataset_path, data.text_column).patches)
    if not as_json:
        _show(found, chosen, bounds)
    path = None
    if chosen and _confirmed(len(chosen), yes, as_json):
        path = write_blacklist(data.dataset_path, data.text_column, chosen, bounds)
        say(f"written to {path}; take out lines or the file to have samples back; protect/ keeps them for ever")
    if as_json:
        show_json(_document(models, found, chosen, bounds, path))
    return ExitCode.DONE


def _show(found: Sequence[Doubt], chosen: Sequence[Doubt], bounds: Bounds) -> None:
    from app.console import say, show_line, visible

    for one in chosen[:SHOWN]:
        show_line(visible(_line(one, bounds)))
    more = f", {len(chosen) - SHOWN} of them not shown" if len(chosen) > SHOWN else ""
    listens = len(found[0].wers) if found else 0
    say(f"{len(chosen)} of {len(found)} samples are wrong in {bounds.repeated} of {listens} listens{more}")


def _confirmed(count: int, yes: bool, as_json: bool) -> bool:
    from app.console import agreed, say

    if yes:
        return True
    if as_json or not sys.stdin.isatty():
        say("nothing was written: nobody is there to confirm; repeat with --yes")
        return False
    return agreed(f"leave these {count} samples out of training?")


def _line(one: Doubt, bounds: Bounds) -> str:
    hint = f"  ({one.hint})" if one.hint else ""
    times = f"{one.wrong(bounds.wer)}/{len(one.wers)}"
    return f"{one.clip.id}  WER {one.wer:.0%}, wrong {times}: {one.clip.text!r}, heard {one.heard[0]!r}{hint}"


def _document(
    models: Sequence[Path], found: Sequence[Doubt], chosen: Sequence[Doubt], bounds: Bounds, path: Path | None
) -> dict[str, Any]:
    samples = [
        {
            "id": one.clip.id,
            "text": one.clip.text,
            "heard": list(one.heard),
            "wer": one.wer,
            "wers": list(one.wers),
            "wrong": one.wrong(bounds.wer),
            "seconds": one.seconds,
            "hint": one.hint,
        }
        for one in chosen
    ]
    return {
        "models": [str(model) for model in models],
        "bounds": asdict(bounds),
        "samples": len(found),
        "listed": samples,
        "file": str(path) if path else None,
        "exit_code": 0,
    }
