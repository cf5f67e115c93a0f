"""``blacklist``: samples that a model cannot learn, written to a patch file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.arguments import Device, Json, Output
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from profiles.schema import Profile
    from training.tasks.base import Progress
    from training.tasks.whisper.blacklist import Bounds, Doubt

SHOWN = 20


def blacklist(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile with completed runs, or a run.")],
    folds: Annotated[
        int,
        typer.Option("--folds", min=0, max=20, help="Folds to hold out in turn; 0: listen without training."),
    ] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=10, help="How often to draw new folds.")] = 1,
    local: Annotated[
        int, typer.Option("--local", min=0, max=64, help="Workers for each training; 0: as in the run.")
    ] = 0,
    wer: Annotated[float, typer.Option("--wer", min=0.01, max=10, help="WER from which a text is wrong.")] = 0.5,
    margin: Annotated[
        float, typer.Option("--margin", min=0, max=100, help="How much likelier the heard text is, nats per token.")
    ] = 2.0,
    listens: Annotated[int, typer.Option("--listens", min=1, max=20, help="Listens of a model (--folds 0).")] = 3,
    repeated: Annotated[
        int, typer.Option("--repeated", min=0, max=20, help="In how many rounds or listens it must be wrong; 0: all.")
    ] = 0,
    runs: Annotated[int, typer.Option("--runs", min=1, max=20, help="Newest models to ask (--folds 0).")] = 1,
    most: Annotated[float, typer.Option("--most", min=0, max=1, help="Largest share that may be left out.")] = 0.1,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, max=1024, help="Clips in one batch.")] = 8,
    device: Device = "auto",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Train and write the list without asking.")] = False,
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """List training samples whose transcript is contradicted by a model that never trained on them."""

    if folds == 1:
        raise BadInput("--folds 1 leaves nothing to train on", "pass 2 or more, or 0")
    passes = rounds if folds else listens
    if repeated > passes:
        what = "rounds" if folds else "listens"
        raise BadInput(f"--repeated {repeated} is more than {passes} {what}", f"raise --{what}")
    manner = _Manner(profile, folds, passes, local, device, batch_size, yes)
    models, settings, found = _judged(output, manner, 1 if folds else runs)
    return _finish(models, settings, found, (wer, margin, repeated or passes, most), yes, as_json)


@dataclass(frozen=True)
class _Manner:
    """How samples are judged."""

    profile: str
    folds: int
    passes: int
    workers: int
    device: str
    batch_size: int
    yes: bool


def _judged(output: Path, manner: _Manner, most: int) -> tuple[list[Path], Profile, list[Doubt]]:
    """Return the models that are there, their profile, and what was heard."""
    from app.cli.models import only_data_on_stdout
    from training.run_folder import RunFolder
    from training.runs import find_models, summarise
    from training.tasks.early_look import check_data

    models = find_models(output, manner.profile, most)
    settings = RunFolder.open(models[0].parent).plan().profile
    if settings.model.task != "whisper":
        raise BadInput(f"{models[0].parent.name}: task {settings.model.task} has no recordings", "name a Whisper run")
    check_data(settings)
    with only_data_on_stdout():
        from training.tasks.whisper.blacklist import listen, plan_listens

        report = _progress(f"blacklist {manner.profile}")
        if not manner.folds:
            listens = plan_listens(models, manner.passes)
            return models, settings, listen(settings, listens, manner.device, manner.batch_size, report)
        from app.cli.fold_training import judge_in_turns, workers_of

        run, how = summarise(models[0].parent), (manner.device, manner.batch_size, report)
        workers = manner.workers or workers_of(run)
        return models, settings, judge_in_turns(run, settings, manner.folds, manner.passes, workers, manner.yes, how)


def _finish(
    models: Sequence[Path],
    settings: Profile,
    found: Sequence[Doubt],
    given: tuple[float, float, int, float],
    yes: bool,
    as_json: bool,
) -> ExitCode:
    """Show what is to be left out, and write it by consent."""
    from app.console import say, show_json
    from training.tasks.speech_dataset import read_tables
    from training.tasks.whisper.blacklist import Bounds, choose, write_blacklist

    bounds, data, path = Bounds(*given), settings.data, None
    chosen = choose(found, bounds, read_tables(data.dataset_path, data.text_column).patches)
    if not as_json:
        _show(found, chosen, bounds)
    if chosen and _confirmed(len(chosen), yes, as_json):
        path = write_blacklist(data.dataset_path, data.text_column, chosen, bounds)
        say(f"written to {path}; remove lines or the file to use the samples again; protect/ keeps them for good")
    if as_json:
        show_json(_document(models, found, chosen, bounds, path))
    return ExitCode.DONE


def _progress(title: str) -> Progress:
    from app.progress import PlainProgress
    from app.run_state import RunState
    from training.events import ProgressEvent

    lines = PlainProgress(title, RunState())

    def report(phase: str, done: int, total: int | None) -> None:
        lines(ProgressEvent(phase=phase, done=done, total=total))

    return report


def _show(found: Sequence[Doubt], chosen: Sequence[Doubt], bounds: Bounds) -> None:
    from app.console import say, show_line, visible

    for one in chosen[:SHOWN]:
        show_line(visible(_line(one, bounds)))
    more = f", {len(chosen) - SHOWN} of them not shown" if len(chosen) > SHOWN else ""
    listens = len(found[0].wers) if found else 0
    again = f", each {bounds.repeated} of {listens} times" if listens > 1 else ""
    of = counted(len(found), "sample")
    say(f"{len(chosen)} of {of} heard differently from the transcript{again}{more}")


def _confirmed(count: int, yes: bool, as_json: bool) -> bool:
    from app.console import agreed, say

    if yes:
        return True
    if as_json or not sys.stdin.isatty():
        say("nothing was written: no terminal to confirm on; repeat with --yes")
        return False
    return agreed(f"leave {counted(count, 'sample')} out of training?")


def _line(one: Doubt, bounds: Bounds) -> str:
    hint = f"  ({one.hint})" if one.hint else ""
    times = f", {one.wrong(bounds)} of {len(one.wers)} times" if len(one.wers) > 1 else ""
    figures = f"WER {one.wer:.0%}, {one.margin:.1f} nats{times}"
    return f"{one.clip.id}  {figures}: {one.clip.text!r}, heard {one.heard[0]!r}{hint}"


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
            "margin": one.margin,
            "margins": list(one.margins),
            "wrong": one.wrong(bounds),
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
