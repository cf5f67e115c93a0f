"""Run folders under one output folder: list, find, compare and clean."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, get_args

from profiles.errors import BadInput
from profiles.installation import RUNS_FOLDER, program
from training.records.plan import FINAL, FIT, RunMetadata, Status, status_word
from training.records.run_files import FolderLock, explain
from training.records.run_folder import RUN_ID, RunFolder, remove_run_folder
from training.records.run_index import other_folders

SHOWN_CANDIDATES = 8


@dataclass(frozen=True)
class RunSummary:
    """One run as a list shows it."""

    path: Path
    run_id: str
    metadata: RunMetadata | None
    """``None`` where the folder is damaged."""
    damage: str
    """What is wrong with the folder; empty if nothing is."""
    live: bool
    """Whether a process works on it."""

    @property
    def status(self) -> str:
        """Status of the metadata, ``damaged``, or ``interrupted``: neither ended nor worked on.

        A resume that was killed before it began leaves the status that the run had before.
        """
        if self.metadata is None:
            return "damaged"
        if self.live:
            return self.metadata.status
        status = self.metadata.earlier.status if self.metadata.earlier else self.metadata.status
        return status if status in FINAL else "interrupted"

    @property
    def lost(self) -> tuple[str, ...]:
        """Machines that a completed run lost and did not get back: the others did their work."""
        return lost_members(self.metadata.metrics) if self.metadata and self.status == "completed" else ()

    @property
    def status_text(self) -> str:
        """The status, with the number of lost machines: ``completed, 1 lost``."""
        return status_word(self.status) + (f", {len(self.lost)} lost" if self.lost else "")

    @property
    def profile(self) -> str:
        return self.metadata.profile if self.metadata else self.path.name[len(self.run_id) :].lstrip("-")

    @property
    def started(self) -> datetime | None:
        return _time(self.metadata.start_time) if self.metadata else None

    @property
    def started_text(self) -> str:
        """When it started, in local time; empty: it is not known."""
        return f"{self.started.astimezone():%Y-%m-%d %H:%M}" if self.started else ""

    @property
    def seconds(self) -> float | None:
        """Duration of a finished run, summed over its attempts (:mod:`training.records.attempts`); ``None`` if it
        ended before its first step."""
        metadata = self.metadata
        if metadata is None or not metadata.end_time:
            return None
        if metadata.status in ("failed", "cancelled") and metadata.metrics.get("attempts") == 0:  # it took no step
            return None
        seconds = metadata.metrics.get("seconds")
        if isinstance(seconds, (int, float)) and seconds > 0:
            return float(seconds)
        end = _time(metadata.end_time) if metadata.attempt == 1 else None  # else there is time between the attempts
        return (end - self.started).total_seconds() if end and self.started else None


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side; every row has one value a run, ``None`` where a run has none."""

    runs: tuple[RunSummary, ...]
    settings: Mapping[str, tuple[Any, ...]]
    """Settings in which the runs differ."""
    metrics: Mapping[str, tuple[Any, ...]]


def lost_members(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lost members in a run's figures."""
    lost = metrics.get("lost")
    return tuple(map(str, lost)) if isinstance(lost, list | tuple) else ()


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def summarise(path: Path) -> RunSummary:
    """Return the summary of the run in ``path``, also of a damaged one."""
    match = RUN_ID.match(path.name)
    run_id = match.group() if match else path.name
    try:
        folder = RunFolder.open(path)
    except BadInput as error:
        return RunSummary(path, run_id, None, error.problem, live=False)
    return RunSummary(path, folder.metadata.run_id, folder.metadata, "", folder.live)


def list_runs(output_dir: Path) -> list[RunSummary]:
    """Return the runs of an output folder, newest first; no folder, no runs.

    Raises:
        BadInput: ``output_dir`` is not a folder, or cannot be read.
    """
    try:
        with os.scandir(output_dir) as entries:
            runs = (entry for entry in entries if RUN_ID.match(entry.name) and entry.is_dir(follow_symlinks=False))
            paths = [Path(entry.path) for entry in runs]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{output_dir}: {error.strerror}", "name the folder of the runs with --output") from error
    return sorted((summarise(path) for path in paths), key=lambda run: run.path.name, reverse=True)


def list_all_runs(output_dir: Path) -> list[RunSummary]:
    """Return the runs of an output folder and, where it is the usual one, of all others of this user, newest first.

    Raises:
        BadInput: as :func:`list_runs`.
    """
    runs = list_runs(output_dir)
    for folder in other_folders(output_dir):
        with suppress(BadInput):
            runs += list_runs(folder)
    return sorted(runs, key=lambda run: run.path.name, reverse=True)


def find_run(output_dir: Path, reference: str) -> Path:
    """Return the run folder that ``reference`` denotes: a path, an id or its beginning, a profile (its newest run), the
    end of an id, or a part of the folder's name; if empty, the newest undamaged run.

    Raises:
        BadInput: no run, or several, fit.
    """
    path = Path(reference)
    if reference and (path / "metadata.json").is_file():
        return path
    runs = list_runs(output_dir)
    if not reference and (listed := runs or list_all_runs(output_dir)):
        return next((run for run in listed if run.metadata), listed[0]).path
    fitting = [run for run in runs if reference and run.path.name.startswith(reference)]
    if len(fitting) == 1 or (fitting and fitting[0].run_id == reference):
        return fitting[0].path
    if newest := [run for run in runs if run.profile == reference]:
        return newest[0].path
    fitting = fitting or [run for run in runs if reference and run.run_id.endswith(reference)]
    fitting = fitting or [run for run in runs if reference and reference in run.path.name]
    if len(fitting) == 1:
        return fitting[0].path
    if fitting:
        names = [run.path.name for run in fitting[:SHOWN_CANDIDATES]] + ["..."] * (len(fitting) > SHOWN_CANDIDATES)
        raise BadInput(f"'{reference}' fits {len(fitting)} runs", f"type more of the id: {', '.join(names)}")
    for folder in other_folders(output_dir):
        with suppress(BadInput):
            return find_run(folder, reference)
    start = f"start one with: {program('distributed-train', 'PROFILE')}"
    hint = f"list them with: {program('runs', 'list')}" if reference else start
    raise BadInput(f"no run {reference!r} in {output_dir}" if reference else f"no runs in {output_dir} yet", hint)


def find_model(output_dir: Path, reference: str) -> Path:
    """Return the folder of a trained model: a model's folder, or a run as :func:`find_run` takes it.

    A profile's name denotes its newest run with a model, an empty reference the newest run with a model.

    Raises:
        BadInput: nothing fits, or the run has no model.
    """
    path = Path(reference)
    if reference and path.is_dir() and not (path / "metadata.json").is_file():
        return finished_model(path) or path  # a run whose documents are gone still has its model
    fitting = (run for run in list_runs(output_dir) if reference in ("", run.profile))
    run = next((run.path for run in fitting if finished_model(run.path)), None) or find_run(output_dir, reference)
    if not finished_model(run):
        state = summarise(run)
        name = str(state.run_id if output_dir == RUNS_FOLDER else run)  # a path also tells where the run is
        live = f"the model is written at the end; watch it with: {program('runs', 'attach', name)}"
        is_fit = state.metadata is not None and state.metadata.command[:1] == [FIT]
        resume = f'fit(resume="{run}")' if is_fit else program("distributed-train", "--resume", name)
        what_next = live if state.live else f"resume it with: {resume}"
        if state.status == "completed":  # a run of the tour, or its model was removed
            what_next = f"train one with: {program('distributed-train', 'PROFILE')}"
        raise BadInput(f"run {state.run_id} ({state.status}) has no model yet", what_next)
    return run / "model"


def find_models(output_dir: Path, reference: str, limit: int = 1) -> list[Path]:
    """Return the model of a run as :func:`find_model` finds it, then of its profile's other runs with the same data.

    Newest first, at most ``limit``.

    Raises:
        BadInput: nothing fits, the run has no model, or the folder is not that of a run.
    """
    model = find_model(output_dir, reference)
    named_run = summarise(model.parent)
    if named_run.metadata is None and (model.parent / "metadata.json").is_file():
        raise BadInput(f"{named_run.path}: {named_run.damage}", "name another run")
    if named_run.metadata is None:
        raise BadInput(f"{model}: not the model of a run", "name a profile or a run: its data set is needed too")
    siblings = [
        run.path / "model"
        for run in list_runs(output_dir)
        if run.metadata
        and (run.profile, run.metadata.dataset) == (named_run.profile, named_run.metadata.dataset)
        and run.path.resolve() != model.parent.resolve()
        and finished_model(run.path)
    ]
    return [model, *siblings][:limit]


def finished_model(run: Path) -> Path | None:
    """Return the folder of a run's model; ``None`` where none was saved."""
    path = run / "model"
    return path if path.is_dir() and any(path.iterdir()) else None


def compare(runs: Sequence[RunSummary]) -> RunComparison:
    """Put runs side by side: the settings in which they differ and all their metrics.

    Raises:
        BadInput: fewer than two runs, or a damaged one.
    """
    if len(runs) < 2:
        raise BadInput("one run cannot be compared", "name two or more runs")
    all_metadata: list[RunMetadata] = []
    for run in runs:
        if run.metadata is None:
            raise BadInput(f"{run.path}: {run.damage}", "leave this run out")
        all_metadata.append(run.metadata)
    settings = _rows([_flat(_choices(metadata)) for metadata in all_metadata])
    differing = {name: row for name, row in settings.items() if any(value != row[0] for value in row)}
    return RunComparison(tuple(runs), differing, _rows([_flat(metadata.metrics) for metadata in all_metadata]))


def _choices(metadata: RunMetadata) -> dict[str, Any]:
    sections = {key: value for key, value in metadata.config.items() if isinstance(value, dict)}
    flat = {name: value for section in sections.values() for name, value in section.items()}
    return {**flat, "profile": metadata.profile, "engine": metadata.engine, "workers": len(metadata.hosts)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _rows(columns: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: tuple(column.get(name) for column in columns) for name in names}


def filter_runs(
    runs: Sequence[RunSummary], *, statuses: Sequence[str] = (), profile: str = "", since: str = ""
) -> list[RunSummary]:
    """Return the runs that fulfil all given conditions.

    Args:
        statuses: only runs with one of these.
        profile: only runs of it.
        since: only runs that started after a local time (``2026-11-20``, ``2026-11-20T08:00``) or within an age
            (``7d``, ``12h``).

    Raises:
        BadInput: no such status, or no time.
    """
    valid_statuses = (*map(status_word, get_args(Status)), "interrupted", "damaged")
    for status in map(status_word, statuses):
        if status not in valid_statuses:
            raise BadInput(f"no status '{status}'", f"there are: {', '.join(valid_statuses)}")
    begin = _moment(since) if since else None
    return [
        run
        for run in runs
        if (not statuses or status_word(run.status) in map(status_word, statuses))
        and (not profile or run.profile == profile)
        and (begin is None or (run.started is not None and run.started >= begin))
    ]


def _moment(text: str) -> datetime:
    age = re.fullmatch(r"(\d{1,6})([dh])", text)
    try:
        if age:
            return datetime.now(timezone.utc) - timedelta(**{{"d": "days", "h": "hours"}[age[2]]: int(age[1])})
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as error:
        hint = "write a date (2026-11-20), a time (2026-11-20T08:00), or an age (7d, 12h)"
        raise BadInput(f"--since {text}: not a time", hint) from error


def runs_to_clean(
    runs: Sequence[RunSummary],
    *,
    older_than_days: float | None = None,
    statuses: Sequence[str] = (),
    keep: int | None = None,
) -> list[RunSummary]:
    """Return the runs that all given conditions allow to remove; a live run is never among them.

    Args:
        runs: newest first, as :func:`list_runs` gives them.
        older_than_days: only runs that started longer ago (damaged ones: by the age of the folder).
        statuses: only runs with one of these.
        keep: the newest this many runs stay, whatever their status.

    Raises:
        BadInput: no condition, which would mean all runs, or no such status.
    """
    if older_than_days is None and keep is None and not statuses:
        raise BadInput("no runs to remove were named", "pass --older-than DAYS, --status STATUS or --keep N")
    now = datetime.now(timezone.utc)
    return [
        run
        for run in filter_runs(runs[keep or 0 :], statuses=statuses)
        if not run.live and (older_than_days is None or _age_days(run, now) > older_than_days)
    ]


def _age_days(run: RunSummary, now: datetime) -> float:
    started = run.started or datetime.fromtimestamp(run.path.lstat().st_mtime, timezone.utc)
    return (now - started).total_seconds() / 86400


def size_of(path: Path) -> int:
    """Return the bytes of the files under ``path``; links count as themselves."""
    total = 0
    for directory, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def remove_run(output_dir: Path, run: RunSummary) -> None:
    """Delete a run folder while holding it; targets of links inside it stay.

    Raises:
        BadInput: it is not a folder of ``output_dir``, a process works on it, or it cannot be deleted.
    """
    if run.path.is_symlink() or run.path.parent.resolve() != output_dir.resolve() or not RUN_ID.match(run.path.name):
        raise BadInput(f"{run.path} is not a run folder of {output_dir}", "remove it yourself if you are sure")
    lock = FolderLock(run.path)
    try:
        lock.acquire()
        remove_run_folder(run.path)
    except OSError as error:
        raise BadInput(*explain(error, run.path)) from error
    finally:
        lock.release()
