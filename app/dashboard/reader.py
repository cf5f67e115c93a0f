"""Reads a run's folder in threads of its own and keeps the newest picture ready; the run never notices.

The screen takes a picture when it paints. Nothing is queued between the two, so a screen that is slow, frozen or dead
makes no reader wait, and no reader makes the run wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from app.dashboard.log_book import LogBook
from app.dashboard.picture import Former, Picture
from app.event_source import EventSource
from app.follow import Follower
from app.report import Ended
from app.run_curves import names, of_run
from app.run_state import INTERRUPTED, RunState, apply, at_its_end
from distributed.planning.document import Planning
from profiles.errors import BadInput, MusterError
from training.event_log import read_events
from training.events import Event
from training.plan import RunPlan, read_plan
from training.run_files import is_live
from training.run_metadata import FINAL, RunMetadata, read_metadata
from training.runs import list_runs

PLANNING = "planning.json"
LOOK = 0.25
"""Seconds between two looks at the logs, and between two at the small files of the folder."""
GRACE = 2.0
"""Seconds for which a run that nobody holds counts as alive: it is handed from the process that prepared it to the one
that carries it out."""
BREATH = 512
"""Events after which the reader lets the screen have the processor."""
_BREATHER = 0.002


class RunReader:
    """Keeps :attr:`picture` up to date until it is closed.

    Args:
        path: the run folder.
        source: where events come from; ``None``: the folder.
    """

    def __init__(self, path: Path, source: EventSource | None = None) -> None:
        self.path = path
        self._given = source
        self._source: EventSource | None = source
        self._state = RunState()
        self._events = 0
        self._read = False
        self._heard: dict[int, float] = {}
        self._ended: Ended | None = None
        self._damage = ""
        self._plan: RunPlan | None = None
        self._metadata: RunMetadata | None = None
        self._planning: Planning | None = None
        self._last_alive = time.monotonic()
        self._logs = LogBook(path / "logs")
        self._former: list[Path] | None = None
        self._former_place = -1
        self._former_shown: Former | None = None
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"dashboard-{target.__name__.strip('_')}", daemon=True)
            for target in (self._follow, self._look)
        ]

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Read no more. Idempotent."""
        self._closed.set()

    @property
    def picture(self) -> Picture:
        """The run at this moment."""
        heard, now = dict(self._heard), time.monotonic()
        return Picture(
            path=self.path,
            state=self._state_in_the_end(),
            now=self._now(),
            plan=self._plan,
            metadata=self._metadata,
            planning=self._planning,
            live=self._alive,
            read=self._read,
            events=self._events,
            heard={rank: now - at for rank, at in heard.items()},
            lines=self._logs.lines,
            former=self._former_shown,
            ended=self._ended,
            damage=self._damage,
        )

    def next_former(self) -> None:
        """Lay the next older run of the same profile under the curves, or none after the last; reads in a thread."""
        threading.Thread(target=self._load_former, name="dashboard-former", daemon=True).start()

    @property
    def _alive(self) -> bool:
        """Whether somebody works on it, or it is played again."""
        return self._given is not None or time.monotonic() - self._last_alive < GRACE

    def _state_in_the_end(self) -> RunState:
        """Return the state, with the end that the metadata tell, or nobody told, where no event could be written."""
        state, metadata = self._state, self._metadata
        if self._given is not None and self._ended is not None:
            return self._ended.state
        if self._alive or not self._read:
            return state
        if metadata is None or metadata.status not in FINAL:
            return at_its_end(state, INTERRUPTED)
        return at_its_end(state, metadata.status, metadata.error_message)

    def _now(self) -> float:
        return self._source.now() if self._source is not None else time.time()

    # ----------------------------------------------------------------------------------------------------- events

    def _follow(self) -> None:
        since_breath = 0
        for event in self._all_events():
            if self._closed.is_set():
                return
            if event is None:
                self._read = True
                since_breath = 0
                continue
            self._state = apply(self._state, event)
            self._events += 1
            if self._read and event.member is not None:
                self._heard[event.member] = time.monotonic()
            since_breath += 1
            if since_breath >= BREATH:
                since_breath = 0
                time.sleep(_BREATHER)
        self._read = True
        if self._source is not None:
            with contextlib.suppress(MusterError, OSError):
                self._ended = self._source.ended(self._state)

    def _all_events(self) -> Iterator[Event | None]:
        try:
            if self._source is None:
                self._source = Follower(self.path)
            self._plan = self._source.plan
            yield from self._source.events()
        except (MusterError, OSError) as error:
            self._damage = error.message if isinstance(error, MusterError) else f"{self.path}: {error.strerror}"
            if self._given is None:
                self._source = None
                yield from read_events(self.path / "events.jsonl")

    # ------------------------------------------------------------------------------------------------------- files

    def _look(self) -> None:
        while not self._closed.is_set():
            if is_live(self.path):
                self._last_alive = time.monotonic()
            with contextlib.suppress(MusterError, OSError):
                self._metadata = read_metadata(self.path)
            self._look_at_plans()
            self._logs.look()
            self._closed.wait(LOOK)

    def _look_at_plans(self) -> None:
        if self._plan is None:
            with contextlib.suppress(BadInput):
                self._plan = read_plan(self.path / "plan.json")
        if self._planning is None and (self.path / PLANNING).is_file():
            with contextlib.suppress(BadInput):
                self._planning = Planning.read(self.path / PLANNING)

    def _load_former(self) -> None:
        if self._former is None:
            self._former = self._runs_like_this()
        self._former_place = -1 if self._former_place + 1 >= len(self._former) else self._former_place + 1
        if self._former_place < 0:
            self._former_shown = None
            return
        path = self._former[self._former_place]
        state = RunState()
        for event in read_events(path / "events.jsonl"):
            state = apply(state, event)
            if self._closed.is_set():
                return
        self._former_shown = Former(path.name[:20], {name: of_run(state.curves, name) for name in names(state.curves)})

    def _runs_like_this(self) -> list[Path]:
        profile = self._plan.profile.name if self._plan else ""
        with contextlib.suppress(BadInput):
            runs = list_runs(Path(os.path.abspath(self.path)).parent)
            return [run.path for run in runs if run.profile == profile and run.path.name < self.path.name]
        return []
