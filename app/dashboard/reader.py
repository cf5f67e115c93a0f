"""Reads a run's folder in threads and keeps the newest picture ready, without affecting the run.

The screen takes a picture when it paints. There is no queue between them, so a slow, frozen or dead screen blocks no
reader, and no reader blocks the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.dashboard.log_book import LogBook, LogLine, LogTotals, RunNotices
from app.follow import Follower
from app.run_view.last_visit import Visit
from app.run_view.member_state import changed
from app.run_view.ribbon import series_of_run
from app.run_view.run_series import Series, series_names
from app.run_view.run_state import INTERRUPTED, RunState, apply, at_its_end, reduce_events
from app.run_view.view import EndedRun, RunView
from distributed.planning.documents.document import Figures, Planning
from distributed.planning.feedback import FIGURES, PLANNING
from profiles.errors import BadInput, MusterError
from training.records.event_log import read_events
from training.records.events import Event
from training.records.plan import FINAL, read_metadata, read_plan
from training.records.run_files import is_live
from training.records.runs import list_runs
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, read_showcase

LOOK = 0.25
"""Seconds between polls of the logs and of the small files of the folder."""
GRACE = 2.0
"""Seconds for which a run that no process holds counts as live: it is being handed over from the process that prepared
it to the one that runs it."""
YIELD_EVERY = 512
"""Events after which the reader yields the processor to the screen."""
_YIELD_SECONDS = 0.002
MARKED = 20.0
"""Seconds between two marks of the last visit, because a terminal may vanish without notice."""
_DOCUMENTS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "plan": ("plan.json", read_plan),
    "planning": (PLANNING, Planning.read),
    "figures": (FIGURES, Figures.read),
}
"""File and reader of the parts of a picture that are read once."""


@dataclass(frozen=True)
class Former:
    """The curves of an earlier run, drawn under the others for comparison."""

    name: str
    curves: Mapping[str, Series]


@dataclass(frozen=True)
class Picture(RunView):
    """A run at one moment, as the tabs draw it."""

    figures: Figures | None = None
    """Measurements that the plan is based on."""
    read: bool = False
    """Whether all events that existed at the start have been read."""
    since: str = ""
    """News since the last visit; empty where there are none."""
    events: int = 0
    heard: Mapping[int, float] = field(default_factory=dict)
    """Seconds since the newest event of each member that had one while the reader was open."""
    lines: tuple[LogLine, ...] = ()
    omits_lines: bool = False
    """Whether the logs have older lines than these, too."""
    totals: LogTotals = field(default_factory=LogTotals)
    former: Former | None = None
    ended: EndedRun | None = None
    damage: str = ""
    """Damage of the folder; empty: none."""


class RunReader:
    """Keeps :attr:`picture` up to date until it is closed.

    Args:
        source: of the events; ``None``: the folder.
        grace: seconds for which a live run may be held by no process.
    """

    def __init__(self, path: Path, source: Follower | None = None, grace: float = GRACE) -> None:
        self._grace = grace
        self._given_source = self._source = source
        self._current = Picture(path)
        """The picture without what depends on the time; both threads write into it, by :meth:`_note`."""
        self._writing = threading.Lock()
        self._heard: dict[int, float] = {}
        self._unheld_since: float | None = None
        """Time since which every poll found that no process holds the run; ``None``: the newest one found one."""
        self._live = True
        self._logs = LogBook(path / "logs")
        self._notices = RunNotices()
        self._showcase_of = 0
        """Modification time of the samples that are shown, in ns."""
        self._former: list[Path] | None = None
        self._former_index = -1
        self._closed = threading.Event()
        self._visit = Visit(path)
        self._marked = time.monotonic()
        self._threads = [
            threading.Thread(target=target, name=f"dashboard-{target.__name__.strip('_')}", daemon=True)
            for target in (self._follow, self._look)
        ]

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._leave_mark()

    def _leave_mark(self) -> None:
        if self._given_source is None and self._current.read:
            self._visit.leave(time.time())

    @property
    def picture(self) -> Picture:
        """The run at this moment."""
        snapshot, heard, now = self._current, dict(self._heard), time.monotonic()
        live = self._given_source is not None or self._live
        return replace(
            snapshot,
            state=self._state_in_the_end(snapshot, live),
            now=self._source.now() if self._source is not None else time.time(),
            live=live,
            replayed=self._given_source is not None,
            heard={rank: now - at for rank, at in heard.items()},
        )

    def _note(self, **changes: Any) -> None:
        with self._writing:
            self._current = changed(self._current, **changes)

    def next_former(self) -> None:
        """Show the next older run of the same profile under the curves, none after the oldest; reads in a thread."""
        threading.Thread(target=self._load_former, name="dashboard-former", daemon=True).start()

    def _state_in_the_end(self, picture: Picture, live: bool) -> RunState:
        """Return the state, with an end from the metadata, or :data:`INTERRUPTED`, where the events lack it."""
        state, metadata = picture.state, picture.metadata
        if self._given_source is not None and picture.ended is not None:
            return picture.ended.state
        if live or not picture.read:
            return state
        if metadata is None or metadata.status not in FINAL:
            return at_its_end(state, INTERRUPTED)
        return at_its_end(state, metadata.status, metadata.error_message)

    # ----------------------------------------------------------------------------------------------------- events

    def _follow(self) -> None:
        self._read_on()
        while self._given_source is None and not self._current.damage and self._has_been_resumed():
            self._source = None
            self._note(ended=None, metrics={}, comparison=None)
            self._read_on()

    def _has_been_resumed(self) -> bool:
        """Wait until a run that has ended goes on, as somebody may resume it; ``False``: the reader is closed."""
        while not self._closed.wait(LOOK):
            if is_live(self._current.path):
                return True
        return False

    def _read_on(self) -> None:
        """Read all events that have not been read yet, until the run ends."""
        since_yield, known = 0, self._current.events
        for event in self._all_events():
            if self._closed.is_set():
                return
            if event is not None and known:
                known -= 1
                continue
            if event is None:
                if not self._current.read:
                    self._note(read=True, since=self._since(self._current.state))
                since_yield = 0
                continue
            self._visit.note(event, self._current.state)
            self._note(state=apply(self._current.state, event), events=self._current.events + 1)
            if self._current.read and event.member is not None:
                self._heard[event.member] = time.monotonic()
            since_yield += 1
            if since_yield >= YIELD_EVERY:
                since_yield = 0
                time.sleep(_YIELD_SECONDS)
        if self._source is not None:
            with contextlib.suppress(MusterError, OSError):
                is_first_read, ended = not self._current.read, self._source.ended(self._current.state)
                since = self._since(ended.state) if is_first_read else ""  # a run that ends is no longer news
                self._note(ended=ended, since=since, metrics=ended.metrics, comparison=ended.comparison)
        self._note(read=True)

    def _since(self, state: RunState) -> str:
        return self._visit.line(state, time.time()) if self._given_source is None else ""

    def _all_events(self) -> Iterator[Event | None]:
        path = self._current.path
        try:
            if self._source is None:
                self._source = Follower(path)
            self._note(plan=self._source.plan)
            yield from self._source.events()
        except (MusterError, OSError) as error:
            self._note(damage=error.message if isinstance(error, MusterError) else f"{path}: {error.strerror}")
            if self._given_source is None:
                self._source = None
                yield from read_events(path / "events.jsonl")

    # ------------------------------------------------------------------------------------------------------- files

    def _look(self) -> None:
        path = self._current.path
        while not self._closed.is_set():
            now = time.monotonic()
            self._unheld_since = None if is_live(path) else self._unheld_since or now
            self._live = self._unheld_since is None or now - self._unheld_since < self._grace
            with contextlib.suppress(MusterError, OSError):
                self._note(metadata=read_metadata(path))
            for name, (file, read) in _DOCUMENTS.items():
                if getattr(self._current, name) is None and (path / file).is_file():
                    with contextlib.suppress(BadInput):
                        self._note(**{name: read(path / file)})
            self._look_at_showcase(path / FOLDER / NAME)
            if self._current.read and self._logs.look(self._notices.since_last(self._current)):
                self._note(lines=self._logs.lines, omits_lines=self._logs.omits_lines, totals=self._logs.totals)
            if self._live and now - self._marked > MARKED:
                self._marked = now
                self._leave_mark()
            self._closed.wait(LOOK)

    def _look_at_showcase(self, file: Path) -> None:
        try:
            written = file.stat().st_mtime_ns
        except OSError:
            return
        if written != self._showcase_of:
            self._showcase_of = written
            self._note(showcase=read_showcase(file))

    def _load_former(self) -> None:
        if self._former is None:
            path, plan = self._current.path, self._current.plan
            profile, self._former = plan.profile.name if plan else "", []
            with contextlib.suppress(BadInput):
                runs = list_runs(Path(os.path.abspath(path)).parent)
                self._former = [run.path for run in runs if run.profile == profile and run.path.name < path.name]
        self._former_index = -1 if self._former_index + 1 >= len(self._former) else self._former_index + 1
        if self._former_index < 0:
            self._note(former=None)
            return
        path = self._former[self._former_index]
        events = read_events(path / "events.jsonl")
        state = reduce_events(itertools.takewhile(lambda _: not self._closed.is_set(), events))
        curves = {name: series_of_run(state, name) for name in series_names(state.curves)}
        self._note(former=Former(path.name[:20], curves))
