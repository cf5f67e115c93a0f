"""Sends the events of a run to its trackers: all from the first one on, each once, however often it is started."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.console import visible
from app.follow import Follower
from app.trackers.base import OpenTracker, TrackedRun, Tracker
from profiles.errors import BadInput
from training.events import Event, StepEvent
from training.run_files import FolderLock, is_live, write_whole
from training.run_folder import RunFolder
from training.run_metadata import FINAL

FOLDER = "trackers"
"""Folder in the run folder; every tracker has its own in it."""
FLUSH_EVERY = 2.0
_POSITION = "position"
_CLASSES = {
    "csv": ("app.trackers.csv_files", "CsvFiles"),
    "tensorboard": ("app.trackers.tensorboard_files", "TensorboardFiles"),
    "wandb": ("app.trackers.wandb_run", "WandbRun"),
    "trackio": ("app.trackers.trackio_run", "TrackioRun"),
}
Say = Callable[[str], None]


@dataclass
class _Sent:
    """One tracker, and how far it has come."""

    name: str
    tracker: Tracker
    folder: Path
    lock: FolderLock
    position: int
    """Number of the last event that it got."""
    newest: dict[int | None, int] = field(default_factory=dict)
    """Newest step of every member."""

    def send(self, event: Event) -> None:
        if event.seq is not None and event.seq > self.position:
            self.tracker.log(event, self.newest.get(event.member, 0))
            self.position = event.seq
        if isinstance(event, StepEvent):
            self.newest[event.member] = event.step

    def keep(self) -> None:
        """Make sure of what it got, and remember how far that is."""
        self.tracker.flush()
        write_whole(self.folder / _POSITION, f"{self.position}\n".encode())


class Tracking:
    """A run on its way to its trackers. A tracker that fails is let go of; the others go on.

    Args:
        path: the run folder.
        names: of trackers.
        say: takes lines for a person.

    Raises:
        BadInput: there is no run, or no tracker could be opened.
    """

    def __init__(self, path: Path, names: Sequence[str], say: Say) -> None:
        self._path = path
        self._say = say
        self._follower = Follower(path)
        run = TrackedRun(path, RunFolder.open(path).metadata)
        self._sent = [sent for name in names if (sent := self._opened(run, name)) is not None]
        self.places: dict[str, str] = {}
        """Where the figures are, by the name of the tracker; known at the end."""
        if not self._sent:
            raise BadInput(f"{path.name}: no tracker could be opened", f"see {path / 'logs'}")

    def _opened(self, run: TrackedRun, name: str) -> _Sent | None:
        folder = self._path / FOLDER / name
        lock = FolderLock(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()  # a second one would send everything twice
            tracker = tracker_class(name)(run, folder)
        except Exception as error:  # noqa: BLE001 - whatever its library raises, the other trackers go on
            self._say(f"{name}: could not be opened: {_told(error)}")
            lock.release()
            return None
        return _Sent(name, tracker, folder, lock, _position(folder))

    def follow(self) -> None:
        """Send all events until the run ends."""
        due = time.monotonic() + FLUSH_EVERY
        for event in self._follower.events():
            if event is not None:
                self._each(lambda sent, event=event: sent.send(event))  # type: ignore[misc]  # mypy: lambda default
            if time.monotonic() > due:
                self._each(_Sent.keep)
                due = time.monotonic() + FLUSH_EVERY
        self._each(_Sent.keep)
        status = RunFolder.open(self._path).metadata.status
        self._each(lambda sent: self._end(sent, status if status in FINAL else "failed"))

    def _end(self, sent: _Sent, status: str) -> None:
        self.places[sent.name] = sent.tracker.close(status)
        sent.lock.release()

    def _each(self, act: Callable[[_Sent], None]) -> None:
        for sent in list(self._sent):
            try:
                act(sent)
            except Exception as error:  # noqa: BLE001 - whatever its library raises, the other trackers go on
                self._say(f"{sent.name}: gave up: {_told(error)}")
                self._sent.remove(sent)
                with contextlib.suppress(Exception):
                    sent.tracker.close("failed")
                sent.lock.release()


def tracker_class(name: str) -> OpenTracker:
    """Return what opens a tracker; imports its library."""
    module, kind = _CLASSES[name]
    found: OpenTracker = getattr(importlib.import_module(module), kind)
    return found


def wait_until_it_lives(path: Path, patience: float) -> None:
    """Wait until somebody holds the run, or it has ended."""
    deadline = time.monotonic() + patience
    while not is_live(path) and RunFolder.open(path).metadata.status not in FINAL and time.monotonic() < deadline:
        time.sleep(0.05)


def _position(folder: Path) -> int:
    try:
        return int((folder / _POSITION).read_text())
    except (OSError, ValueError):
        return -1


def _told(error: Exception) -> str:
    return visible(f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}")[:500]
