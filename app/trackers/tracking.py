"""Feeds a run's events to its trackers: all from the first one on, each once, even if the run is resumed.

Trackers run in a separate process (``python -m app.trackers.tracking NAMES``), started with the run; missing
libraries are reported before it starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.console import say, visible
from app.follow import Follower
from app.trackers import notify
from app.trackers.kinds import KINDS, TrackedRun, Tracker
from profiles.declarations import OptionError
from profiles.errors import BadInput, MusterError, RunFailed
from profiles.installation import package_line
from profiles.run_settings import tracker_names
from training.records.events import Event, StepEvent
from training.records.plan import FINAL
from training.records.run_files import FolderLock, is_live, write_atomically
from training.records.run_folder import RunFolder
from training.run.processes import BackgroundProcess, run_from_stdin

FOLDER = "trackers"
"""Folder in the run folder; each tracker has a subfolder."""
FLUSH_EVERY = 2.0
_POSITION = "position"
_NOTIFY = "notify"
_PATIENCE = 60.0
"""Seconds within which the run must have started."""
_NICENESS = 10
_LIBRARIES = ("tensorboard", "wandb", "trackio")
"""Trackers that need a library of the same name."""
Say = Callable[[str], None]


def checked_trackers(text: str) -> tuple[str, ...]:
    """Return the trackers of a comma-separated list.

    Raises:
        BadInput: one is unknown, or its library is not installed here.
    """
    try:
        names = tracker_names(text)
    except OptionError as error:
        raise BadInput(f"trackers: {error.problem}", "write for example csv,tensorboard") from error
    missing = [name for name in names if name in _LIBRARIES and importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"trackers: {', '.join(missing)} is not installed", package_line(*missing))
    return names


def start_trackers(run_dir: Path, names: Sequence[str] = ()) -> None:
    """Start the trackers of a run in a separate process; a failure is reported and does not stop the run.

    Notifications, if requested, are one of the trackers.
    """
    names = [*names, *([_NOTIFY] if notify.is_requested() else [])]
    if not names:
        return
    try:
        BackgroundProcess("app.trackers.tracking", ",".join(names)).start(run_dir)
    except (OSError, RunFailed) as error:
        say(f"warning: trackers: {error}; the run goes on without them")


@dataclass
class _TrackerFeed:
    """One tracker and its position in the log."""

    name: str
    tracker: Tracker
    folder: Path
    lock: FolderLock
    position: int
    """Number of the last event that it received."""
    newest: dict[int | None, int] = field(default_factory=dict)
    """Newest step of every member."""

    def send(self, event: Event) -> None:
        if event.seq is not None and event.seq > self.position:
            self.tracker.log(event, self.newest.get(event.member, 0))
            self.position = event.seq
        if isinstance(event, StepEvent):
            self.newest[event.member] = event.step

    def keep(self) -> None:
        """Flush the tracker, and record its position."""
        self.tracker.flush()
        write_atomically(self.folder / _POSITION, f"{self.position}\n".encode())


class Tracking:
    """Feeds a run to its trackers. A tracker that fails is dropped; the others continue.

    Args:
        say: callback for status lines.

    Raises:
        BadInput: there is no run, or no tracker could be opened.
    """

    def __init__(self, path: Path, names: Sequence[str], say: Say) -> None:
        self._path = path
        self._say = say
        self._follower = Follower(path)
        run = TrackedRun(path, RunFolder.open(path).metadata)
        self._feeds = [feed for name in names if (feed := self._opened(run, name)) is not None]
        self.locations: dict[str, str] = {}
        """Location of each tracker's figures; filled at the end."""
        if not self._feeds:
            raise BadInput(f"{path.name}: no tracker could be opened", f"see {path / 'logs'}")

    def _opened(self, run: TrackedRun, name: str) -> _TrackerFeed | None:
        folder = self._path / FOLDER / name
        lock = FolderLock(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()  # a second process would send everything twice
            opener = notify.Notifier if name == _NOTIFY else KINDS[name]
            tracker = opener(run, folder)
        except Exception as error:  # noqa: BLE001 - third-party libraries: any error drops this tracker only
            self._say(f"{name}: could not be opened: {_error_text(error)}")
            lock.release()
            return None
        position = -1
        with contextlib.suppress(OSError, ValueError):
            position = int((folder / _POSITION).read_text())
        return _TrackerFeed(name, tracker, folder, lock, position)

    def follow(self) -> None:
        """Send all events until the run ends."""
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it
            self._send_events()
        self._keep()
        outcome = self._follower.outcome()

        def end(feed: _TrackerFeed) -> None:
            self.locations[feed.name] = feed.tracker.close(outcome.status, outcome.message)
            feed.lock.release()

        self._for_each_feed(end)

    def _send_events(self) -> None:
        due = time.monotonic() + FLUSH_EVERY
        for event in self._follower.events():
            if event is not None:
                self._for_each_feed(lambda feed, event=event: feed.send(event))  # type: ignore[misc]  # mypy: lambda default
            if time.monotonic() > due:
                self._keep()
                due = time.monotonic() + FLUSH_EVERY

    def _keep(self) -> None:
        if self._path.is_dir():
            self._for_each_feed(_TrackerFeed.keep)

    def _for_each_feed(self, act: Callable[[_TrackerFeed], None]) -> None:
        for feed in list(self._feeds):
            try:
                act(feed)
            except Exception as error:  # noqa: BLE001 - third-party libraries: any error drops this tracker only
                self._say(f"{feed.name}: stopped sending after an error: {_error_text(error)}")
                self._feeds.remove(feed)
                with contextlib.suppress(Exception):
                    feed.tracker.close("failed")
                feed.lock.release()


def _error_text(error: Exception) -> str:
    return visible(f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}")[:500]


def main(names: str) -> int:
    """Track the run whose folder is read from stdin, to its end."""
    path = run_from_stdin("trackers.log")
    if path is None:
        return 0
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)  # training has priority
    try:
        deadline = time.monotonic() + _PATIENCE
        while not is_live(path) and RunFolder.open(path).metadata.status not in FINAL and time.monotonic() < deadline:
            time.sleep(0.05)  # until a process holds the run, or it has ended
        tracking = Tracking(path, names.split(","), lambda line: print(line, flush=True))
        tracking.follow()
    except MusterError as error:
        if not path.is_dir() and _NOTIFY in names.split(","):  # the run ended before this process had begun
            notify.send(path.name, "failed", notify.ending_text("failed", early=True))
        print(error, flush=True)
        return int(error.exit_code)
    for name, location in tracking.locations.items():
        print(f"{name}: {location}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
