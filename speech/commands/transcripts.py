"""``patches``, ``blacklist`` and ``pseudo-label``: the effect of patch files on a data set, samples that a model cannot
learn, and transcripts by a model for recordings that have none.

For a blacklist, a model is trained without each fold of the samples in turn, after the cost has been shown.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, ModelReference, Output
from app.cli.terminal import answer, reporting
from app.console import answered_yes, say, show_line, visible
from profiles.errors import BadInput, ExitCode, RunFailed, StoppedByUser, counted
from profiles.locations import is_on_hub
from profiles.quantities import duration_text, error_rate_text
from profiles.schema import Profile
from speech.data.patches import FOLDER, PSEUDO, AppliedPatch, TextBounds, find_recordings
from speech.data.speech_clips import FileSource
from speech.data.speech_dataset import has_tables, read_tables
from training.records.run_folder import RunFolder, has_snapshots
from training.records.runs import RunSummary, find_model, find_models, list_runs, remove_run, summarise
from training.run.resumption import plan_to_resume
from training.workers.data_findings import check_data

if TYPE_CHECKING:
    from speech.whisper.cleaning.blacklist import Bounds, SuspectClip
    from speech.whisper.cleaning.cross_validation import Fold
    from training.records.plan import RunPlan
    from training.tasks.base import Progress

FOLDS = "blacklist"
"""Folder for the folds' results, inside the folder of the run folders."""
_SHOWN = 20


def blacklist(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile with completed runs, or a run.")],
    folds: Annotated[
        int, typer.Option(min=0, max=20, help="Folds to hold out in turn; 0: listen without training.")
    ] = 3,
    rounds: Annotated[int, typer.Option(min=1, max=10, help="How often to draw new folds.")] = 1,
    local: Annotated[int, typer.Option(min=0, max=64, help="Workers for each training; 0: as in the run.")] = 0,
    wer: Annotated[float, typer.Option(min=0.01, max=10, help="Lowest WER at which a text counts as wrong.")] = 0.5,
    margin: Annotated[
        float, typer.Option(min=0, max=100, help="How much likelier the heard text must be, in nats a token.")
    ] = 2.0,
    listens: Annotated[int, typer.Option(min=1, max=20, help="How often each model listens (--folds 0).")] = 3,
    repeated: Annotated[
        int, typer.Option(min=0, max=20, help="In how many rounds or listens it must be wrong; 0: all.")
    ] = 0,
    runs: Annotated[int, typer.Option(min=1, max=20, help="How many of the newest models to use (--folds 0).")] = 1,
    max_share: Annotated[float, typer.Option("--most", min=0, max=1, help="Largest share that may be left out.")] = 0.1,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Clips in a batch.")] = 8,
    device: Device = "auto",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Train and write the list without asking.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Show which samples should be left out, and write them to a patch file after confirmation.

    Raises:
        BadInput: the run, its data or a figure cannot be used, or nobody agreed to train.
        RunFailed: a training failed.
        StoppedByUser: the same command goes on.
    """
    if folds == 1:
        raise BadInput("--folds 1 leaves nothing to train on", "pass 2 or more, or 0")
    passes = rounds if folds else listens
    if repeated > passes:
        unit = "rounds" if folds else "listens"
        raise BadInput(f"--repeated {repeated} is more than {passes} {unit}", f"raise --{unit}")
    models = find_models(output, profile, 1 if folds else runs)
    settings = RunFolder.open(models[0].parent).plan().profile
    if settings.model.trait != "speech":
        message = f"{models[0].parent.name}: task {settings.model.task} has no recordings"
        raise BadInput(message, "name a Whisper run")
    check_data(settings)
    with reporting(f"blacklist {profile}") as report:
        from speech.whisper.cleaning import blacklist as listening

        listening_options = (device, batch_size, report)
        if folds:
            run = summarise(models[0].parent)
            doubts = judge_in_turns(run, settings, folds, passes, local or workers_of(run), yes, listening_options)
        else:
            doubts = listening.find_suspects(settings, listening.plan_passes(models, passes), *listening_options)
    bounds = listening.Bounds(wer, margin, repeated or passes, max_share)
    return _finish(models, settings, doubts, bounds, yes, as_json)


def _finish(
    models: Sequence[Path], settings: Profile, doubts: Sequence[SuspectClip], bounds: Bounds, yes: bool, as_json: bool
) -> ExitCode:
    """Show the samples to leave out, and write them after confirmation."""
    from speech.whisper.cleaning.blacklist import choose, write_blacklist

    data, path = settings.data, None
    chosen = choose(doubts, bounds, read_tables(data.dataset_path, data.text_column).patches)
    if not as_json:
        _show(doubts, chosen, bounds)
    may_write = yes
    if chosen and not yes:
        if as_json or not sys.stdin.isatty():
            say("nothing was written: no terminal to confirm on; repeat with --yes")
        else:
            may_write = answered_yes(f"leave {counted(len(chosen), 'sample')} out of training?")
    if chosen and may_write:
        path = write_blacklist(data.dataset_path, data.text_column, chosen, bounds)
        say(f"written to {path}; remove lines or the file to use the samples again; protect/ keeps them for good")
    document = {
        "models": [str(model) for model in models],
        "bounds": asdict(bounds),
        "samples": len(doubts),
        "listed": [_document(doubt, bounds) for doubt in chosen],
        "file": str(path) if path else None,
    }
    return answer(as_json, document, ())


def _show(doubts: Sequence[SuspectClip], chosen: Sequence[SuspectClip], bounds: Bounds) -> None:
    for doubt in chosen[:_SHOWN]:
        hint = f"  ({doubt.hint})" if doubt.hint else ""
        times = f", {doubt.failed_passes(bounds)} of {len(doubt.wers)} times" if len(doubt.wers) > 1 else ""
        figures = f"WER {error_rate_text(doubt.wer)}, {doubt.margin:.1f} nats{times}"
        show_line(visible(f"{doubt.clip.id}  {figures}: {doubt.clip.text!r}, heard {doubt.heard[0]!r}{hint}"))
    hidden_note = f", {len(chosen) - _SHOWN} of them not shown" if len(chosen) > _SHOWN else ""
    listens = len(doubts[0].wers) if doubts else 0
    repeated_note = f", each {bounds.repeated} of {listens} times" if listens > 1 else ""
    total = counted(len(doubts), "sample")
    say(f"{len(chosen)} of {total} heard differently from the transcript{repeated_note}{hidden_note}")


def _document(doubt: SuspectClip, bounds: Bounds) -> dict[str, object]:
    figures = {name: getattr(doubt, name) for name in ("heard", "wer", "wers", "margin", "margins", "seconds", "hint")}
    return {"id": doubt.clip.id, "text": doubt.clip.text, "wrong": doubt.failed_passes(bounds), **figures}


def judge_in_turns(
    run: RunSummary,
    profile: Profile,
    folds: int,
    rounds: int,
    workers: int,
    yes: bool,
    listening_options: tuple[str, int, Progress],
) -> list[SuspectClip]:
    """Train on all folds but one, in turn, and let each model transcribe the held-out fold.

    Args:
        run: whose profile it is; its time tells what the trainings will take.
        yes: start without asking.
        how: device, batch size and progress of listening.

    Raises:
        BadInput: the data cannot be divided, or nobody agreed.
        StoppedByUser: the same command goes on.
        RunFailed: a training failed.
    """
    from speech.whisper.cleaning.cross_validation import judge_fold, plan_folds, read_results, training_clips

    clips = training_clips(profile)
    planned = plan_folds(run.path.parent / FOLDS, profile, clips, folds, rounds)
    waiting = [fold for round_folds in planned for fold in round_folds if not fold.result.is_file()]
    if waiting:
        say(_cost(waiting, len(clips), run, workers))
        if not yes and not sys.stdin.isatty():
            raise BadInput("there is no terminal to confirm the trainings on", "repeat with --yes, or with --folds 0")
        if not yes and not answered_yes("train them? After Ctrl-C, the same command continues"):
            raise BadInput("nothing was trained", "--folds 0 uses models already trained on these samples")
    for number, fold in enumerate(waiting, 1):
        say(f"fold {number} of {len(waiting)}: {len(fold.others)} samples to train on, {len(fold.held)} held out")
        judge_fold(fold, profile, trained(fold, profile, workers), *listening_options)
    return read_results(planned)


def workers_of(run: RunSummary) -> int:
    """Return the number of local workers of a run; one if it ran on other machines."""
    local = run.metadata is not None and run.metadata.run_type == "local"
    return max(1, len(run.metadata.hosts)) if local and run.metadata else 1


def _cost(waiting: Sequence[Fold], samples: int, run: RunSummary, workers: int) -> str:
    share = sum(len(fold.others) for fold in waiting) / samples
    trainings = "1 training" if len(waiting) == 1 else f"{len(waiting)} trainings"
    text = f"{trainings} on this machine, {share:.1f} times the work of one on all {samples} samples"
    if run.seconds is None or workers != workers_of(run) or run.metadata is None or run.metadata.run_type != "local":
        return f"{text}; how long one takes has not been measured here"
    return f"{text}: about {duration_text(share * run.seconds)}, run {run.run_id} took {duration_text(run.seconds)}"


def trained(fold: Fold, profile: Profile, workers: int) -> Path:
    """Return the model of the fold's run, which is started or resumed as needed."""
    from distributed.planning.memory.fitting import fit
    from distributed.preparation.preflight import local_memory_budgets
    from speech.whisper.cleaning.cross_validation import profile_of, write_data
    from training.run.local_plan import plan_local_run

    for earlier in list_runs(fold.runs):
        if earlier.status == "completed":
            return earlier.path / "model"
        if earlier.live:
            raise BadInput(f"{earlier.path}: another command trains this fold", "wait until it ends")
        if has_snapshots(earlier.path):
            return _model_of(plan_to_resume(earlier.path), earlier.path)
        remove_run(fold.runs, earlier)
    write_data(fold)
    chosen = profile_of(fold, profile, workers)
    return _model_of(plan_local_run(fit(chosen, local_memory_budgets(chosen, workers), say), workers))


def _model_of(plan: RunPlan, earlier: Path | None = None) -> Path:
    from app.cli.train.local_run import run_to_end
    from app.progress import progress_for

    command = ["blacklist"]
    output = Path(plan.profile.run.output_dir)
    folder = RunFolder.resume(earlier, plan, command) if earlier else RunFolder.create(output, plan, command)
    ended = run_to_end(plan, folder, progress_for(plan.profile.name))
    outcome = ended.outcome
    if outcome.exit_code is ExitCode.STOPPED:
        raise StoppedByUser("stopped", "the same command continues")
    if ended.model is None or outcome.status != "completed":
        raise RunFailed(f"{folder.path}: {outcome.message}", outcome.hint)
    return ended.model


def patches(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Data folder or table.")],
    origin: Annotated[bool, typer.Option("--origin", help="Show file and line of each change.")] = False,
    text_column: Annotated[str, typer.Option(help="Transcript column; empty: the usual names.")] = "",
    as_json: Json = False,
) -> ExitCode:
    """Show the changes made by the files in a data set's folder 'patches'.

    Raises:
        BadInput: the data set or one of the files cannot be used.
    """
    if is_on_hub(dataset):
        raise BadInput(f"{dataset}: patches belong to a data set in a folder", "name the folder of its tables")
    tables = read_tables(dataset, text_column)
    folder = (tables.folder or Path()) / FOLDER
    remaining = {split: sum(not clip.left_out for clip in clips) for split, clips in tables.splits.items()}
    changes = [asdict(change) for change in tables.changes]
    document = {"folder": str(folder), "samples": remaining, "changes": changes, "notes": list(tables.notes)}
    answer(as_json, document, [_line(change, origin) for change in tables.changes])
    if as_json:
        return ExitCode.DONE
    for note in tables.notes:
        say(f"note: {visible(note)}")
    for split, count in remaining.items():
        say(f"{split}: {count} of {counted(len(tables.splits[split]), 'sample')}")
    counts = Counter(change.kind for change in tables.changes)
    summary = ", ".join(f"{kind} {count}" for kind, count in counts.items()) or "nothing is changed"
    say(f"{summary}; patches are read from {visible(folder)}")
    return ExitCode.DONE


def _line(change: AppliedPatch, origin: bool) -> str:
    position = f"  ({change.where})" if origin else ""
    return visible(f"{change.split} {change.id}  {change.kind}: {change.before!r} -> {change.after!r}{position}")


def pseudo_label(
    model: ModelReference,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the recordings.")],
    into: Annotated[
        Path | None, typer.Option(metavar="DATASET", help="Data folder to write to; empty: FOLDER.")
    ] = None,
    agree_with: Annotated[str, typer.Option(metavar="MODEL", help="Second model; empty: the first, with noise.")] = "",
    min_confidence: Annotated[float, typer.Option(max=0, help="Lowest mean log-probability of a token.")] = -1.0,
    min_agreement: Annotated[
        float, typer.Option(min=0, max=1, help="Lowest agreement (1 - WER) of the two texts.")
    ] = 0.9,
    max_compression: Annotated[float, typer.Option(min=0, help="Largest compression ratio of a text.")] = 2.4,
    max_no_speech: Annotated[float, typer.Option(min=0, max=1, help="Largest no-speech probability.")] = 0.6,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Recordings in one batch.")] = 8,
    language: Language = "",
    device: Device = "auto",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Write transcripts by a model for recordings that have none.

    Raises:
        BadInput: a model or a folder cannot be used, or no recording lacks a transcript.
    """
    target = (into or folder).expanduser()
    if not target.is_dir():
        raise BadInput(f"{target}: no such folder", "name the folder of a data set, or none")
    files, transcribed = _without_transcripts(find_recordings(folder.expanduser(), target), target)
    if transcribed:
        say(f"skipped, because they have a transcript in a table of {target}: {counted(transcribed, 'recording')}")
    model_path = find_model(output, model)
    second_path = find_model(output, agree_with) if agree_with else None
    bounds = TextBounds(min_confidence, max_compression, max_no_speech, min_agreement)
    with reporting(f"pseudo-label with {model_path}") as progress:
        from speech.whisper.cleaning.pseudo_label import LabellingJob, label

        job = LabellingJob(model_path, second_path, language, device, batch_size, bounds)
        rows = label(job, files, target / PSEUDO, progress)
    kept_count = sum(not row.left_out for row in rows)
    reasons = Counter(row.kind for row in rows if row.left_out)
    if as_json:
        counts = {"recordings": len(rows), "kept": kept_count, "left_out": dict(reasons)}
        return answer(True, {"file": str(target / PSEUDO), **counts, "with_transcript": transcribed}, ())
    for reason, count in reasons.most_common():
        say(f"left out {count}: {reason}")
    no_use = "nothing to train on: another model, or other bounds"
    use = "to train on them: --set pseudo_share=0.5" if kept_count else no_use
    say(f"kept {kept_count} of {counted(len(rows), 'text')} in {target / PSEUDO}; {use}; to undo: delete the file")
    return ExitCode.DONE


def _without_transcripts(files: list[tuple[str, Path]], target: Path) -> tuple[list[tuple[str, Path]], int]:
    """Return the files without those that a table in ``target`` names, and the number of those."""
    transcribed = set[Path]()
    if has_tables(target):
        clips = [clip for split in read_tables(str(target)).splits.values() for clip in split]
        transcribed = {clip.audio.path.resolve() for clip in clips if isinstance(clip.audio, FileSource)}
    new = [(name, path) for name, path in files if path.resolve() not in transcribed]
    if not new:
        raise BadInput(f"{target}: every recording has a transcript ({len(files)})", "there is nothing to do")
    return new, len(files) - len(new)
