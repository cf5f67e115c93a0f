"""The trainings of ``blacklist``: one for each fold of the samples, told with what they cost before they start."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.local_run import run_to_end
from app.console import agreed, duration_text, say
from app.progress import progress_for
from distributed.planning.fitting import fit
from distributed.preparation.members import room_here
from profiles.errors import BadInput, ExitCode, RunFailed, StoppedByUser
from profiles.schema import Profile
from training.local_plan import plan_local_run
from training.plan import RunPlan
from training.run_folder import RunFolder, has_snapshots
from training.runs import RunSummary, list_runs, plan_to_resume, remove_run

if TYPE_CHECKING:
    from training.tasks.base import Progress
    from training.tasks.whisper.blacklist import Doubt
    from training.tasks.whisper.held_out import Fold

FOLDER = "blacklist"
"""In the folder of the run folders: what is known of folds."""


def judge_in_turns(
    run: RunSummary, profile: Profile, folds: int, rounds: int, workers: int, yes: bool, how: tuple[str, int, Progress]
) -> list[Doubt]:
    """Train on all folds but one, in turns, and let each model listen to the fold that it does not know.

    Args:
        run: whose profile it is; its time tells what the trainings will take.
        yes: start without asking.
        how: device, batch size and progress of listening.

    Raises:
        BadInput: the data cannot be divided, or nobody agreed.
        StoppedByUser: the same command goes on.
        RunFailed: a training failed.
    """
    from training.tasks.whisper.held_out import judge_fold, plan_folds, read_judged, training_clips

    clips = training_clips(profile)
    planned = plan_folds(run.path.parent / FOLDER, profile, clips, folds, rounds)
    waiting = [fold for found in planned for fold in found if not fold.result.is_file()]
    if waiting:
        say(_cost(waiting, len(clips), run, workers))
        _agree(yes)
    for number, fold in enumerate(waiting, 1):
        say(f"fold {number} of {len(waiting)}: {len(fold.others)} samples to train on, {len(fold.held)} held out")
        judge_fold(fold, profile, _trained(fold, profile, workers), *how)
    return read_judged(planned)


def workers_of(run: RunSummary) -> int:
    """Return how many workers of this machine the run had; one if it was trained on others."""
    local = run.metadata is not None and run.metadata.run_type == "local"
    return max(1, len(run.metadata.hosts)) if local and run.metadata else 1


def _cost(waiting: Sequence[Fold], samples: int, run: RunSummary, workers: int) -> str:
    share = sum(len(fold.others) for fold in waiting) / samples
    trainings = "1 training" if len(waiting) == 1 else f"{len(waiting)} trainings"
    text = f"{trainings} on this machine, {share:.1f} times the work of one on all {samples} samples"
    if run.seconds is None or workers != workers_of(run) or run.metadata is None or run.metadata.run_type != "local":
        return f"{text}; how long that takes was never measured here"
    return f"{text}: about {duration_text(share * run.seconds)}, run {run.run_id} took {duration_text(run.seconds)}"


def _agree(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadInput("there is no terminal to confirm the trainings on", "repeat with --yes, or with --folds 0")
    if not agreed("train them? After Ctrl-C, the same command continues"):
        raise BadInput("nothing was trained", "--folds 0 asks the models that were trained on these samples")


def _trained(fold: Fold, profile: Profile, workers: int) -> Path:
    """Return the model of the fold's run, which is begun, or goes on where it ended."""
    from training.tasks.whisper.held_out import profile_of, write_data

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
    return _model_of(plan_local_run(fit(chosen, room_here(chosen, workers), say), workers))


def _model_of(plan: RunPlan, earlier: Path | None = None) -> Path:
    command = ["blacklist"]
    output = Path(plan.profile.run.output_dir)
    folder = RunFolder.resume(earlier, plan, command) if earlier else RunFolder.create(output, plan, command)
    ended = run_to_end(plan, folder, progress_for(plan.profile.name))
    if ended.exit_code is ExitCode.STOPPED:
        raise StoppedByUser("stopped", "the same command continues")
    if ended.model is None or ended.status != "completed":
        raise RunFailed(f"{folder.path}: {ended.message}", ended.hint)
    return ended.model
