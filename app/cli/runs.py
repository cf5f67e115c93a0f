"""``runs list|show|compare|clean``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from app.breakdown_words import breakdown_document, predictions_in, run_lines
from app.console import (
    agreed,
    bytes_text,
    command_about,
    command_line,
    duration_text,
    say,
    show,
    show_json,
    show_line,
    visible,
)
from app.figures import metric_label, metric_text, start_line, state_document
from app.report import evaluation_lines
from app.run_state import RunState, at_its_end, reduce_events
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode
from training.run_folder import RunFolder
from training.runs import (
    RunSummary,
    compare,
    find_run,
    list_runs,
    narrowed,
    remove_run,
    size_of,
    summarise,
    to_clean,
)

_UNFINISHED = ("interrupted", "cancelled", "failed")


def list_command(
    output: Path, as_json: bool, statuses: Sequence[str] = (), profile: str = "", since: str = ""
) -> ExitCode:
    """Show the runs of a folder, all or those that were asked for.

    Raises:
        BadInput: a status or a time that nobody knows.
    """
    found = list_runs(output)
    runs = narrowed(found, statuses=statuses, profile=profile, since=since)
    if as_json:
        show_json({"runs": [_summary_document(run) for run in runs], "exit_code": 0})
    elif found and not runs:
        say(f"none of {counted(len(found), 'run')} in {output} matches")
    elif not runs:
        say(f"no runs in {output} yet; start one with: {command_line('distributed-train', 'PROFILE')}")
    else:
        show(_table(runs))
    return ExitCode.DONE


def show_command(output: Path, reference: str, as_json: bool) -> ExitCode:
    """Show everything about one run."""
    path = find_run(output, reference)
    folder = RunFolder.open(path)
    run, state = summarise(path), reduce_events(folder.events())
    if not run.live:
        state = at_its_end(state, run.status, folder.metadata.error_message)
    if as_json:
        details = folder.metadata.model_dump()
        heard = breakdown_document(predictions_in(path)[1])
        figures = {"state": state_document(state), "breakdown": heard, "bytes": size_of(path)}
        show_json({**details, **_summary_document(run), **figures, "exit_code": 0})
    else:
        for line in _details(run, folder, state):
            show_line(line)
    return ExitCode.DONE


def compare_command(output: Path, references: Sequence[str], as_json: bool) -> ExitCode:
    """Put runs side by side."""
    table = compare([summarise(find_run(output, reference)) for reference in references])
    ids = [run.run_id for run in table.runs]
    if as_json:
        rows = {"settings": table.settings, "metrics": table.metrics}
        lists = {kind: {k: list(v) for k, v in part.items()} for kind, part in rows.items()}
        show_json({"runs": ids, **lists, "exit_code": 0})
        return ExitCode.DONE
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("")
    for run_id in ids:
        shown.add_column(run_id, justify="right")
    for part in (table.settings, table.metrics):
        for name, values in part.items():
            if any(isinstance(value, list | dict) for value in values):
                continue  # figures of every member: --json has them
            shown.add_row(Text(visible(name)), *[Text(_value(value)) for value in values])
        shown.add_row()
    show(shown)
    return ExitCode.DONE


def clean_command(
    output: Path,
    older_than_days: float | None,
    statuses: Sequence[str],
    keep: int | None,
    yes: bool,
    as_json: bool,
) -> ExitCode:
    """Remove runs, after showing which.

    Raises:
        BadInput: no condition, or nobody there to confirm and no ``--yes``.
    """
    runs = to_clean(list_runs(output), older_than_days=older_than_days, statuses=statuses, keep=keep)
    if not as_json and not runs:
        say("nothing to remove")
    elif not as_json:
        show(_table(runs, with_size=True))
    if runs and not yes and not _confirmed(len(runs)):
        say("nothing was removed")
        runs = []
    freed = sum(size_of(run.path) for run in runs)
    for run in runs:
        remove_run(output, run)
    if as_json:
        show_json({"removed": [run.run_id for run in runs], "bytes": freed, "exit_code": 0})
    elif runs:
        show_line(f"removed {counted(len(runs), 'run')}, {bytes_text(freed)}")
    return ExitCode.DONE


def _confirmed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise BadInput(
            f"{counted(count, 'run')} to remove, and no terminal to confirm on",
            "check the list, then repeat with --yes",
        )
    return agreed(f"remove {counted(count, 'run')} for good?")


def _summary_document(run: RunSummary) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "path": str(run.path),
        "status": run.status,
        "live": run.live,
        "damage": run.damage,
        "profile": run.profile,
        "start_time": run.metadata.start_time if run.metadata else None,
        "seconds": run.seconds,
        "strategy": run.metadata.strategy if run.metadata else None,
        "workers": len(run.metadata.hosts) if run.metadata else None,
        "metrics": run.metadata.metrics if run.metadata else {},
    }


def _table(runs: Sequence[RunSummary], with_size: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "profile", "status", "started", "took", "by", "result"):
        table.add_column(name, no_wrap=name in ("run", "status"), overflow="fold")
    if with_size:
        table.add_column("size", justify="right")
    for run in runs:
        cells = _cells(run) + ([bytes_text(size_of(run.path))] if with_size else [])
        table.add_row(*[Text(visible(cell)) for cell in cells])
    return table


def _cells(run: RunSummary) -> list[str]:
    started = f"{run.started.astimezone():%Y-%m-%d %H:%M}" if run.started else "-"
    metadata = run.metadata
    if metadata is None:
        return [run.run_id, run.profile, run.status, started, "-", "-", run.damage]
    took, members = duration_text(run.seconds), f"{len(metadata.hosts)} x {metadata.strategy}"
    result = metadata.error_message or _headline_of(metadata.metrics)
    return [run.run_id, run.profile, run.status, started, took, members, result]


def _headline_of(metrics: dict[str, Any]) -> str:
    after = metrics.get("after")
    if not isinstance(after, dict):
        return ""
    parts = []
    for split in sorted(after, key=lambda split: split != "test"):
        if isinstance(after[split], dict) and after[split]:
            name = "wer" if "wer" in after[split] else next(iter(after[split]))
            value = after[split][name]
            shown = metric_text(name, value) if isinstance(value, float) else _value(value)
            parts.append(f"{metric_label(name)} {split} {shown}")
    return ", ".join(parts)


def _details(run: RunSummary, folder: RunFolder, state: RunState) -> list[str]:
    metadata = folder.metadata
    step = f"{state.step}/{state.total_steps}" if state.total_steps else str(state.step)
    lines = [
        f"run       {metadata.run_id} ({run.status}, attempt {metadata.attempt})",
        f"profile   {metadata.profile}",
        f"model     {metadata.model}",
        f"data      {metadata.dataset}",
        f"strategy  {metadata.strategy} over {metadata.engine}, {counted(len(metadata.hosts), 'worker')}",
        f"started   {metadata.start_time}, took {duration_text(run.seconds)}",
        f"steps     {step}",
        f"folder    {run.path}, {bytes_text(size_of(run.path))}",
    ]
    if metadata.strategy_reason:
        lines.insert(5, f"why       {metadata.strategy_reason}")
    if metadata.error_message and run.status != "cancelled":
        lines.append(f"error     {metadata.error_message}")
    if run.status in _UNFINISHED:
        lines.append(f"kept      {state.kept}")
    if parts := start_line(folder.events()):
        lines.append(f"start     {parts}")
    lines += evaluation_lines(state)
    lines += run_lines(run.path)
    lines += [f"warning   {notice.text}" for notice in state.warnings[-10:]]
    if run.status in _UNFINISHED and state.resume_step is not None:
        lines.append(f"resume    {command_about(run.path, 'distributed-train', '--resume')}")
    return [visible(line) for line in lines]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else visible(value)
