"""Notifications when a run ends, fails, does not start or loses a machine: on the desktop, to a web address, or by a
command.

The target is set on this computer (``--notify``, or the variable ``MUSTER_NOTIFY``) and is never part of a profile, so
no foreign file can name a program or an address.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from app.console import say, visible
from app.run_view.metrics import result_text
from app.run_view.timeline import ENDINGS, with_reason
from app.trackers.kinds import TrackedRun
from distributed.planning.feedback import planning_in
from distributed.planning.run_time import promised_time, took_text
from profiles.bootstrap import release_and_end
from profiles.errors import BadInput, StoppedByUser
from profiles.installation import NOTIFICATION_TARGET
from profiles.quantities import span_text
from training.records.event_log import newest_number
from training.records.events import EvaluationEvent, Event, MemberEvent
from training.records.run_files import write_atomically
from training.records.runs import summarise
from training.run.narration import loss_sentence

DESKTOP = "desktop"
_PATIENCE = 20.0
"""Timeout of a command or a web request in seconds."""
_HOST = re.compile(r"https?://[^\s/?#@]+(?:[/?#][^\s]*)?\Z")
_SCRIPT = ("on run argv", "display notification (item 2 of argv) with title (item 1 of argv)", "end run")
_BY_DESKTOP: dict[str, tuple[str, ...]] = {
    "notify-send": ("notify-send", "--app-name=Muster"),
    "osascript": ("osascript", *(word for line in _SCRIPT for word in ("-e", line))),
}
"""Commands of Linux and macOS, without title and text."""


def is_requested() -> bool:
    """Whether notifications are requested on this computer."""
    return bool(os.environ.get(NOTIFICATION_TARGET))


def choose(target: str) -> None:
    """Have runs that this process starts notify ``target``: ``desktop``, a web address, or a command.

    Raises:
        BadInput: this computer cannot notify it.
    """
    _words(target, "", "")
    os.environ[NOTIFICATION_TARGET] = target


def _words(target: str, title: str, text: str) -> list[str]:
    """Return the command line that notifies; empty for a web address.

    Raises:
        BadInput: there is no such program here.
    """
    if target.startswith(("https://", "http://")):
        if not _HOST.match(target):
            raise BadInput(f"notify: {visible(target)!r} is no web address", "write it as https://HOST/PATH")
        return []
    if target == DESKTOP:
        for program, command in _BY_DESKTOP.items():
            if shutil.which(program):
                return [*command, title, text]
        hint = "install notify-send (Debian, Ubuntu: apt install libnotify-bin), or name a command or a web address"
        raise BadInput("notify: this computer has no program that shows notifications", hint)
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise BadInput(f"notify: {target!r} is no command line ({error})", "check its quotes") from None
    if not words or shutil.which(os.path.expanduser(words[0])) is None:
        raise BadInput(f"notify: there is no command {visible(target)!r}", "write desktop, https://... or a command")
    return [os.path.expanduser(words[0]), *words[1:], f"{title}: {text}" if text else title]


@contextlib.contextmanager
def failed_start_notified(profile: str) -> Iterator[None]:
    """Notify if a start fails or is stopped inside the context, where there is no run yet that its trackers follow."""
    try:
        with _stopped_by_signals() if is_requested() else contextlib.nullcontext():
            yield
    except (Exception, KeyboardInterrupt) as error:  # whatever ended it, who waits for it is told; it is raised again
        if is_requested():
            status = "cancelled" if isinstance(error, (KeyboardInterrupt, StoppedByUser)) else "failed"
            send(profile, status, ending_text(status, str(error) if status == "failed" else "", early=True))
        raise


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let kill and a closed terminal stop what is inside the context, where they would end the process at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedByUser("the terminal was closed" if number == signal.SIGHUP else "stopped by kill")

    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if in_main_thread}
    ending = {number: handler for number, handler in handlers.items() if handler in (signal.SIG_DFL, release_and_end)}
    for number in ending:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in ending.items():
            signal.signal(number, handler)


def ending_text(status: str, details: str = "", early: bool = False) -> str:
    """Return what is sent of an end: ``failed before its first step: no space left`` if it was ``early``."""
    ending = ENDINGS.get(status, status) + (" before its first step" if early else "")
    return with_reason(ending, details)


def send(profile: str, status: str, text: str, run_id: str = "") -> str:
    """Send a message about a run, and return why it did not get through, or an empty text."""
    target, title, text = os.environ.get(NOTIFICATION_TARGET, ""), f"Muster, {profile}", visible(text)
    about = {"run": run_id, "profile": profile, "status": status}
    try:
        _deliver(target, title, text, about)
    except (OSError, subprocess.SubprocessError, http.client.HTTPException, BadInput) as error:
        problem = f"did not get through: {text} ({_reason(error)})"
        say(f"notify: {problem}")
        return problem
    return ""


def _deliver(target: str, title: str, text: str, about: dict[str, str]) -> None:
    if words := _words(target, title, text):
        variables = {**os.environ, "MUSTER_RUN": about["run"], "MUSTER_STATUS": about["status"]}
        subprocess.run(words, env=variables, timeout=_PATIENCE, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        return
    message = f"{title}: {text}"
    body = json.dumps({"text": message, "content": message, **about}).encode()
    request = urllib.request.Request(target, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=_PATIENCE).close()


class Notifier:
    """Sends a message for each lost machine, and for the end with the newest result.

    A command gets the message as its last word, and ``MUSTER_RUN`` and ``MUSTER_STATUS`` as variables. A web address
    gets a POST with a JSON document: ``text`` and ``content`` (the message, as Slack and Discord read it), ``run``,
    ``profile``, ``status``.
    """

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._run = run
        self._ended = folder / "ended"
        self._result = ""
        _words(os.environ.get(NOTIFICATION_TARGET, ""), "", "")

    def log(self, event: Event, newest_step: int) -> None:
        if isinstance(event, EvaluationEvent):
            self._result = result_text(event, limit=2)
        elif isinstance(event, MemberEvent) and event.status == "lost" and event.member is not None:
            name = event.name or self._run.name(event.member)
            self._send("running", loss_sentence(name, event.message))

    def flush(self) -> None:
        """Do nothing: each message is sent at once."""

    def close(self, status: str, message: str = "") -> str:
        ending = f"{status} {newest_number(self._run.path / 'events.jsonl')}"
        if self._ended.exists() and self._ended.read_text() == ending:
            return "sent before"
        has_folder = self._run.path.is_dir()  # that of a run that could not begin is removed
        details = (message if status == "failed" else "") or self._result
        if status == "completed" and (seconds := summarise(self._run.path).seconds) is not None:
            took = took_text(seconds, promised_time(planning_in(self._run.path)))
            details = f"{took}; {details}" if details else took
        text = ending_text(status, details, early=not has_folder)
        if problem := self._send(status, text):
            return problem
        if has_folder:
            write_atomically(self._ended, ending.encode())
        return "sent"

    def _send(self, status: str, text: str) -> str:
        return send(self._run.metadata.profile, status, text, self._run.metadata.run_id)


def _reason(error: Exception) -> str:
    """Return why a message failed, without the target, which may contain a password."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit code {error.returncode}"
    if isinstance(error, (TimeoutError, subprocess.TimeoutExpired)):
        return f"no answer within {span_text(_PATIENCE)}"
    return visible(error)
