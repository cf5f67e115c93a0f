"""The text at the end of a run: its results, where the model is, what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.console import command_about, command_line, is_of_tour, purpose_of, visible
from app.run_view.figures import MORE_DATA, data_text, stages_times_text
from app.run_view.metrics import simulated_text
from app.run_view.run_state import RunState
from app.run_view.tables.evaluations import evaluation_lines, evaluations_document
from app.run_view.tables.showcase import showcase_lines
from app.run_view.view import EndedRun
from app.task_results import results_of
from distributed.planning.run_time import plan_stages_text
from profiles.declarations import trait_of
from profiles.errors import counted
from profiles.installation import GROUPED_NAMES
from profiles.quantities import duration_text
from training.numerics.schedule import ends_in_warm_up
from training.records.attempts import starting_seconds_in
from training.records.model_folders import has_chat_template, holds_tokenizer, is_language_model, starting_model
from training.records.plan import SCRIPT, RunMetadata, RunPlan
from training.records.runs import RunSummary, finished_model, lost_members
from training.run.outcome import unmerged_text


def title_of(plan: RunPlan) -> str:
    """Return the title of a run in one line."""
    if plan.launch is not None:
        return f"{plan.launch.title} · {plan.run_id} · {counted(plan.world_size, 'process', 'processes')}"
    present = plan.world_size - len(plan.absent)
    return f"{plan.profile.name} · {plan.run_id} · {counted(present, 'worker')}"


def document(ended: EndedRun) -> dict[str, Any]:
    """Return the JSON document of a run that has ended, without the exit code at its end."""
    content: dict[str, Any] = {
        "run_id": ended.plan.run_id,
        "run_dir": str(ended.path),
        "status": ended.outcome.status,
        "profile": ended.plan.profile.name,
        "strategy": SCRIPT if ended.plan.is_script else ended.plan.profile.strategy.strategy,
        "engine": ended.plan.engine,
        "workers": ended.plan.world_size,
        "model": str(ended.model) if ended.model else None,
        "lost": lost_members(ended.metrics) if ended.outcome.status == "completed" else (),
        "snapshot_step": ended.state.resume_step,
        "evaluations": evaluations_document(ended.state),
        "metrics": dict(ended.metrics),
    }
    if ended.outcome.status != "completed":
        content["error"] = {"message": ended.outcome.message, "hint": ended.outcome.hint}
        content["resume_command"] = ended.resume_command
    return content


def completed_lines(ended: EndedRun) -> list[str]:
    """Return the report of a completed run."""
    rate = ended.whole_rate
    speed = f", {rate} over the whole run" if rate else ""
    attempts = ended.metrics.get("attempts", 1)
    resumed = f" in {attempts} attempts" if attempts > 1 else ""
    steps = ended.metrics.get("steps", ended.state.step)  # an attempt that only completes the run takes no step
    if ended.plan.is_script:
        return ["", f"Done in {duration_text(ended.state.seconds(0.0))}", f"run     {ended.path}"]
    lines = [
        "",
        f"Done: {counted(steps, 'step')}{resumed}{speed}",
        ended.took,
        *_preparation(ended.state),
        *evaluation_lines(ended.state),
    ]
    if ended.state.simulated_hours is not None:
        lines.append(f"clock   {simulated_text(ended.state.simulated_hours)} on the simulated machines")
    if lost := lost_members(ended.metrics):
        gone = unmerged_text(ended.state.unmerged)
        words = f"{', '.join(lost)}{f', with {gone}' if gone else ''}; the others completed the work"
        lines.append(f"lost    {visible(words)}")
    if ended.plan.is_staged:
        lines.append(f"layers  {visible(plan_stages_text(ended.plan))}")
    if stages := stages_times_text(ended.state):
        lines.append(f"stages  {stages.removeprefix('stages ')}")
    if data := data_text(ended.state, whole_run=True):
        lines.append(f"data    {data}; {MORE_DATA}")
    lines += [*results_of(ended.plan.profile.model.task).lines(ended.path), *showcase_lines(ended.path)]
    if remark := ends_in_warm_up(steps, ended.plan.profile):
        lines.append(f"short   {remark}")
    if ended.model is None and not is_of_tour(ended.plan.profile.name):
        return [*lines, f"run     {ended.path}"]
    lines.append(f"model   {ended.model}" if ended.model is not None else f"run     {ended.path}")
    return [*lines, "next", *[f"  {command}  {purpose_of(command)}".rstrip() for command in next_commands(ended)]]


def _preparation(state: RunState) -> Iterator[str]:
    """Yield how long the run was prepared before it trained, which is not part of its time."""
    seconds = starting_seconds_in(state.attempts)
    if seconds is not None and seconds >= _NOTICEABLE and len(state.attempts) == 1:
        yield f"before  {duration_text(seconds)} of preparation"


def next_commands(ended: EndedRun) -> list[str]:
    """Return the commands to use the model of a run, or to resume it from its snapshot; after the tour, to begin with
    one's own machines, and to train its job on this computer."""
    if is_of_tour(ended.plan.profile.name):
        return [command_line(), command_line("distributed-train", "demo"), command_about(ended.path, "runs", "show")]
    if ended.outcome.status != "completed":
        return list(filter(None, [ended.resume_command]))
    model = ended.plan.profile.model
    commands = results_of(model.task).commands(ended.path, ended.plan) if ended.model is not None else []
    if not commands:
        commands = writing_commands(ended.path, model.trait == "texts", bool(starting_model(ended.plan.profile)))
    return [*commands, command_about(ended.path, "runs", "show")]


def writing_commands(run_dir: Path, measurable: bool, has_base: bool) -> list[str]:
    """Return the commands to use a language model; empty where a run has left none.

    Args:
        measurable: whether ``evaluate`` knows its task.
        has_base: whether it was trained from another model.
    """
    model = finished_model(run_dir)
    if model is None or not (is_language_model(model) and holds_tokenizer(model)):
        return []
    compare = ["--compare"] if has_base else []
    chat = [command_about(run_dir, "model", "chat")] if has_chat_template(model) else []
    measure = [f"{command_about(run_dir, 'model', 'evaluate')} DATASET"] if measurable else []
    return [command_about(run_dir, "model", "generate", *compare) + " 'YOUR PROMPT'", *chat, *measure]


_NOTICEABLE = 1.0
"""Seconds of preparation from which on they are told."""
_PROGRAMS = ("cli_typer.py", "muster")


def rerun_line(metadata: RunMetadata, current_folder: Path | None = None) -> str:
    """Return the command that starts a run once more, from any folder; empty where no command started it.

    Args:
        current_folder: folder in which it is typed, which the command then need not enter.
    """
    program, *words = metadata.command or [""]
    if Path(program).name not in _PROGRAMS:
        return ""
    words[:1] = GROUPED_NAMES.get("".join(words[:1]), tuple(words[:1]))
    line = shlex.join([*(["python3"] if program.endswith(".py") else []), program, *words])
    is_here = not metadata.folder or metadata.folder == str(current_folder)
    return line if is_here else f"cd {shlex.quote(metadata.folder)} && {line}"


def what_next(run: RunSummary) -> tuple[str, ...]:
    """Return the commands for the model that a run has left; empty where it has none."""
    if run.status != "completed" or run.metadata is None or finished_model(run.path) is None:
        return ()
    task, model = run.metadata.task, run.metadata.config.get("model", {})
    texts = trait_of(task) == "texts"
    commands = results_of(task).commands(run.path, None)
    return tuple(commands or writing_commands(run.path, texts, texts and not model.get("from_scratch")))


def stopped_line(ended: EndedRun) -> str:
    """Return the line after a stop: what is saved and how to resume."""
    if ended.plan.is_script:
        return f"stopped; the logs are in {ended.path / 'logs'}"
    command = ended.resume_command
    following = f"resume with: {command}" if command else f"the log is in {ended.path}"
    if is_of_tour(ended.plan.profile.name):
        following += f"; your own machines: {command_line()}"
    return f"stopped; {ended.state.saved_progress}; {following}"


def leftovers_text(processes: Sequence[str]) -> str:
    """Return which processes of a run that has ended are left on a machine."""
    return "; ".join(processes) or "nothing left running"


def failure_hint(ended: EndedRun) -> str:
    """Return what to do after a failure."""
    hint = ended.outcome.hint or ended.hint_for(ended.outcome.message)
    hints = [hint] if hint else []
    if command := ended.resume_command:
        hints.append(f"resume from step {ended.state.resume_step} with: {command}")
    return "; ".join(hints) or f"see {ended.path / 'logs'}"
