"""``runs``, ``report``, ``track`` and ``web``: list, show and compare runs, and pass them on: as one file, to trackers,
in the browser."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import sys
import webbrowser
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Column, Table
from rich.text import Text

from app.cli.arguments import OUTPUT, AnyRun, Json, Output, Statuses, Yes, new_app
from app.cli.terminal import answer, confirmed
from app.console import PIPE_WIDTH, command_line, profile_text, say, show, show_json, show_line, visible
from app.run_view.figures import start_line, state_document
from app.run_view.headline import headline
from app.run_view.metrics import metric_label, metric_text
from app.run_view.pair_paths import pair_lines
from app.run_view.run_state import UNFINISHED
from app.run_view.tables.evaluations import evaluation_lines
from app.run_view.tables.showcase import showcase_document, showcase_lines
from app.run_view.timeline import entry_text
from app.run_view.view import RunView, read_view
from app.task_results import results_of
from profiles.errors import BadInput, ExitCode, counted
from profiles.quantities import bytes_text, duration_text, figure_text
from training.records.plan import FIT, SCRIPT, status_word
from training.records.run_folder import RunFolder
from training.records.runs import (
    RunSummary,
    compare,
    filter_runs,
    find_run,
    list_all_runs,
    list_runs,
    remove_run,
    runs_to_clean,
    size_of,
    summarise,
)

_MOST_WAYS = 12
_COLUMNS: dict[str, Literal["left", "right"]] = {
    "run": "left", "profile": "left", "status": "left", "started": "left", "trained": "right", "workers": "right",
    "size": "right", "in": "left", "result": "left",
}  # fmt: skip
"""Columns of the list of runs, with their side."""
_CUT = ("profile", "in", "result")
"""Columns that are cut where a terminal is too narrow for them."""
_LEAST_RESULT = 16
"""Columns for the result: ``WER test 12.3 %``."""
_WIDE = 100
"""Columns of a terminal from which on all are shown."""


runs = new_app()


@runs.callback()
def runs_root(context: typer.Context, output: Output = OUTPUT, as_json: Json = False) -> ExitCode | None:
    """List, show, compare and clean runs."""
    return list_command(output, as_json) if context.invoked_subcommand is None else None


@runs.command("list", help="List the runs, newest first.")
def list_command(
    output: Output = OUTPUT,
    as_json: Json = False,
    statuses: Statuses = [],  # noqa: B006 - typer copies it
    profile: Annotated[str, typer.Option(metavar="NAME", help="Only runs of this profile.")] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only runs newer than this: 2026-11-20, 2026-11-20T08:00, 7d or 12h.")
    ] = "",
) -> ExitCode:
    """Show the runs of a folder, all or those that match the filters.

    Raises:
        BadInput: a status or a time that nobody knows.
    """
    all_runs = list_all_runs(output)
    chosen = filter_runs(all_runs, statuses=statuses, profile=profile, since=since)
    if as_json:
        show_json({"runs": [_summary_document(run) for run in chosen], "exit_code": 0})
    elif all_runs and not chosen:
        say(f"none of the {counted(len(all_runs), 'run')} in {output} matches")
    elif not chosen:
        say(f"no runs in {output} yet; start one with: {command_line('distributed-train', 'PROFILE')}")
    else:
        show(_table(chosen, output))
    return ExitCode.DONE


@runs.command("show", help="Show one run: its settings, course and result.")
def show_command(run: AnyRun = "", output: Output = OUTPUT, as_json: Json = False) -> ExitCode:
    """Show everything about one run."""
    path = find_run(output, run)
    folder, view = RunFolder.open(path), read_view(path)
    summary = summarise(path)
    if not as_json:
        return answer(False, {}, _details(summary, folder, view))
    breakdown = results_of(folder.metadata.task).document(path)
    figures = {"state": state_document(view.state), "breakdown": breakdown, "bytes": size_of(path)}
    figures |= {"workers": view.expected, "promised": view.time.document() if view.time else None}
    figures["showcase"] = showcase_document(path)
    return answer(True, {**folder.metadata.model_dump(), **_summary_document(summary), **figures}, ())


@runs.command("compare", help="Compare runs: the settings that differ, and the metrics.")
def compare_command(
    references: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs, as for 'show'.")],
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Show runs side by side."""
    table = compare([summarise(find_run(output, reference)) for reference in references])
    ids = [run.run_id for run in table.runs]
    if as_json:
        return answer(True, {"runs": ids, "settings": table.settings, "metrics": table.metrics}, ())
    rows = Table(
        "", *[Column(run_id, justify="right") for run_id in ids], box=None, header_style="bold", pad_edge=False
    )
    for group in (table.settings, table.metrics):
        for name, values in group.items():
            if any(isinstance(value, list | dict) for value in values):
                continue  # figures of every member: --json has them
            rows.add_row(Text(visible(name)), *[Text(_value(value)) for value in values])
        rows.add_row()
    show(rows)
    return ExitCode.DONE


@runs.command(
    "clean", help="Remove runs after showing which; all conditions given must hold, and a live run is never touched."
)
def clean_command(
    older_than: Annotated[float | None, typer.Option(metavar="DAYS", min=0, help="Only runs older than this.")] = None,
    statuses: Statuses = [],  # noqa: B006 - typer copies it
    keep: Annotated[int | None, typer.Option(metavar="N", min=0, help="Keep the newest N runs.")] = None,
    yes: Yes = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Remove runs, after showing which.

    Raises:
        BadInput: no condition, or nobody there to confirm and no ``--yes``.
    """
    chosen = runs_to_clean(list_runs(output), older_than_days=older_than, statuses=statuses, keep=keep)
    if not as_json and not chosen:
        say("nothing to remove")
    elif not as_json:
        show(_table(chosen, output, with_size=True))
    count = counted(len(chosen), "run")
    if chosen and not yes and not confirmed(f"remove {count} for good?", f"{count} to remove"):
        say("nothing was removed")
        chosen = []
    freed = sum(size_of(run.path) for run in chosen)
    for run in chosen:
        remove_run(output, run)
    lines = [f"removed {count}, {bytes_text(freed)}"] if chosen else []
    return answer(as_json, {"removed": [run.run_id for run in chosen], "bytes": freed}, lines)


def _summary_document(run: RunSummary) -> dict[str, Any]:
    metadata, names = run.metadata, ("run_id", "status", "live", "damage", "profile", "seconds")
    return {
        **{name: getattr(run, name) for name in names},
        "path": str(run.path),
        "start_time": metadata.start_time if metadata else None,
        "strategy": metadata.strategy if metadata else None,
        "workers": len(metadata.hosts) if metadata else None,
        "lost": run.lost,
        "metrics": metadata.metrics if metadata else {},
    }


def _table(runs: Sequence[RunSummary], output: Path, with_size: bool = False) -> Table:
    """Return a line for each run; a narrow terminal gets fewer columns, and long texts are cut there."""
    elsewhere = any(os.path.abspath(run.path.parent) != os.path.abspath(output) for run in runs)
    narrow = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns < _WIDE
    hidden = {
        *(() if with_size else ["size"]),
        *(() if elsewhere else ["in"]),
        *(["started", "workers", "in"] if narrow else ()),
    }
    cut: Literal["ellipsis", "crop"] = "ellipsis" if (sys.stdout.encoding or "").lower().startswith("utf") else "crop"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (names := [name for name in _COLUMNS if name not in hidden]):
        least = _LEAST_RESULT if name == "result" else None
        table.add_column(name, no_wrap=name not in _CUT, justify=_COLUMNS[name], min_width=least)
    for run in runs:
        cells = _cells(run, 1 if narrow else None)
        cells |= {"size": bytes_text(size_of(run.path))} if with_size else {}
        table.add_row(*[Text(visible(cells[name]), no_wrap=True, overflow=cut) for name in names])
    return table


def _cells(run: RunSummary, most: int | None = None) -> dict[str, str]:
    """Return the cells of a run by column, without its size; ``most``: splits whose result is shown."""
    metadata = run.metadata
    cells = {
        "run": run.run_id, "profile": profile_text(run.profile), "status": run.status_text,
        "started": run.started_text or "-",
        "trained": "-", "workers": "-", "in": os.path.abspath(run.path.parent), "result": run.damage,
    }  # fmt: skip
    if metadata is None:
        return cells
    result = metadata.error_message or _headline_of(metadata.metrics, most)
    fit, script = [*metadata.command, "", ""][:2]
    if fit == FIT and script:
        cells["profile"] += f" ({Path(script).name})"
    seconds = run.seconds
    if run.live and run.started and metadata.attempt == 1:
        seconds = (datetime.now(timezone.utc) - run.started).total_seconds()
    return {**cells, "trained": duration_text(seconds), "workers": str(len(metadata.hosts)), "result": result}


def _headline_of(metrics: dict[str, Any], most: int | None) -> str:
    after = metrics.get("after")
    if not isinstance(after, dict):
        return ""
    headlines = []
    for split in sorted(after, key=lambda split: split != "test"):
        if isinstance(after[split], dict) and after[split]:
            name = "wer" if "wer" in after[split] else next(iter(after[split]))
            value = after[split][name]
            shown = metric_text(name, value) if isinstance(value, float) else _value(value)
            headlines.append(f"{metric_label(name)} {split} {shown}")
    return ", ".join(headlines[:most])


def _details(run: RunSummary, folder: RunFolder, view: RunView) -> list[str]:
    metadata, state = folder.metadata, view.state
    lost = f", lost {visible(', '.join(run.lost))}" if run.lost else ""
    way = f", {metadata.strategy} over {metadata.engine}" if view.expected > 1 else ""
    lines = [
        f"run       {metadata.run_id} ({status_word(run.status)}{lost}, attempt {metadata.attempt})",
        f"profile   {metadata.profile}",
        f"model     {metadata.model}",
        f"data      {metadata.dataset}",
        f"workers   {view.expected}{way}",
        f"started   {run.started_text or '-'}",
        f"time      {_time_text(view)}",
        f"steps     {state.steps_text}",
        f"folder    {run.path}, {bytes_text(size_of(run.path))}",
    ]
    if metadata.strategy == SCRIPT:
        lines = [line for line in lines if not line.startswith(("data ", "steps "))]
        lines[3] = f"ran in    {counted(view.expected, 'process', 'processes')}"
    if metadata.strategy_reason:
        lines.insert(5, f"why       {metadata.strategy_reason}")
    if metadata.error_message and run.status != "cancelled":
        lines.append(f"error     {metadata.error_message}")
        lines += [f"to do     {hint}"] if (hint := view.hint_for(metadata.error_message)) else []
    if run.status in UNFINISHED and metadata.strategy != SCRIPT:
        lines.append(f"kept      {state.saved_progress}")
    if state.attempts and (start := start_line(folder.events(), state.attempts[-1])):
        lines.append(f"start     {start}")
    lines += [f"path      {line}" for line in pair_lines(state.members, view.name, _MOST_WAYS)]
    lines += evaluation_lines(state)
    lines += [*results_of(metadata.task).lines(run.path), *showcase_lines(run.path)]
    lines += [f"warning   {entry_text(notice, view.name)}" for notice in state.warnings[-10:]]
    if run.status in UNFINISHED and view.resume_command:
        lines.append(f"resume    {view.resume_command}")
    return [visible(line) for line in lines]


def _time_text(view: RunView) -> str:
    """Return how long a run took, or when it will end, beside what its plan promised."""
    line = headline(view)
    return ", ".join((line.word, *line.details)) if view.live else view.took


def _value(value: Any) -> str:
    if isinstance(value, float):
        return figure_text(value)
    return "-" if value is None else visible(value)


# ----------------------------------------------------------------------------------------------------------- for others


LOOPBACK = "127.0.0.1"


def report(
    run: AnyRun = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: report.html of the run.")
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Write one HTML file with everything about a run."""
    from app.html_report.page import show_report, write_report

    folder = find_run(output, run)
    path = write_report(folder, out)
    if opens:
        say(visible(show_report(path)))
    document = {"run_dir": str(folder), "report": str(path), "bytes": path.stat().st_size}
    return answer(as_json, document, [visible(path)])


def track(
    to: Annotated[str, typer.Option(metavar="NAMES", help="csv, tensorboard, wandb, trackio; separated by commas.")],
    run: AnyRun = "",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Send the events of a run to trackers until it ends."""
    from app.trackers.tracking import Tracking, checked_trackers

    folder = find_run(output, run)
    names = checked_trackers(to)
    if not names:
        raise BadInput("--to names no tracker", "write for example --to csv,tensorboard")
    with contextlib.redirect_stdout(sys.stderr):  # libraries talk, and stdout is for data
        tracking = Tracking(folder, names, say)
        tracking.follow()
    lines = [visible(f"{name}: {place}") for name, place in tracking.locations.items()]
    code = ExitCode.DONE if len(tracking.locations) == len(names) else ExitCode.RUN_FAILED
    return answer(as_json, {"run_dir": str(folder), "trackers": tracking.locations}, lines, code)


def web(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run to show; none: the guided set-up.")] = "",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="TCP port; 0: any free one.")] = 0,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Let other machines connect: this machine's address.")
    ] = LOOPBACK,
    output: Output = OUTPUT,
) -> ExitCode:
    """Serve the dashboard of a run, or the guided set-up, until Ctrl-C."""
    from app.web import server

    path = find_run(output, run) if run else None
    listener = server.listen(listen, port)
    if not ipaddress.ip_address(listen).is_loopback:
        for line in _meaning(listen, listener.getsockname()[1]):
            say(line)
    say("open this address (it works once); Enter makes a new one, Ctrl-C ends:")
    server.serve(path, listener, _show_address)
    return ExitCode.DONE


def _show_address(address: str, open_page: Callable[[str], bool] = webbrowser.open) -> None:
    """Print an address, and open it if there is a local browser."""
    from app.html_report.page import has_browser  # only when asked for

    show_line(address)
    if has_browser():
        open_page(address)


def _meaning(address: str, port: int) -> list[str]:
    lines = [
        f"warning: listening on {address}, port {port}, for other machines too",
        "  every machine that reaches it can try to connect",
        "  anybody who has the address below can watch and control this",
        "  nothing is encrypted: anybody who reads this network's traffic can do the same",
        f"  safer: leave out --listen, and run there: ssh -L {port}:{LOOPBACK}:{port} THIS_MACHINE",
    ]
    if ipaddress.ip_address(address).is_unspecified:
        from distributed.system import own_addresses  # starts a program

        addresses = [ipaddress.ip_address(one) for _, one in own_addresses()]
        reachable = ", ".join(
            str(address) for address in addresses if not address.is_loopback and not address.is_link_local
        )
        lines.append(f"  to connect from there, use instead of {LOOPBACK}: {reachable or 'no address found'}")
    return lines
