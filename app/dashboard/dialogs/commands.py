"""Requests of the dashboard to the run, the proof after a stop that nothing is left, and the report."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from textual.app import ComposeResult
from textual.content import Content
from textual.notifications import SeverityLevel
from textual.widgets import Static

from app.dashboard.reader import Picture
from app.dashboard.tabs.pane import LEVELS
from app.run_view.figures import LAST_EVALUATION, end_stage
from app.run_view.headline import ending_order, headline, order_stage
from app.run_view.view import RunView
from app.shell.dialogs import CommandDialog, Dialog
from app.shell.folding import Prose
from app.shell.text import StatusMark, literal
from distributed.cleaning.clean import leftovers
from distributed.hosts.file import RUN_HOSTS, as_listed, load_hosts, without_unapproved_pythons
from distributed.hosts.schema import Machine
from distributed.ssh.command_log import CommandRecord, commands_of
from profiles.errors import BadInput, MusterError
from profiles.installation import command_about
from training.records.events import RequestEvent
from training.records.plan import status_word
from training.records.run_files import is_live
from training.run.requests.request_book import Action, leave_request

_EVERY = 0.25
_ON_ITS_WAY = 10.0
"""Seconds for which a request without an answer is not sent again."""


@dataclass
class SentRequest:
    """A request that was sent from this dashboard."""

    id: str
    text: str
    at: float
    answer: RequestEvent | None = None
    """The newest answer; ``None``: none yet."""

    @property
    def result(self) -> str:
        """``ok``, or why it was refused; empty: it is under way."""
        outcome = self.answer.outcome if self.answer else ""
        refused = f"refused: {self.answer.message}" if self.answer and outcome == "refused" else ""
        return "ok" if outcome == "done" else refused


@dataclass
class Commands:
    """The requests that this dashboard has sent."""

    path: Path
    asked: list[SentRequest] = field(default_factory=list)

    def ask(self, action: Action, now: float, machine: str = "", entry: Machine | None = None) -> str:
        """Send a request, unless the same one is on its way; return what is wrong, or an empty text."""
        if not is_live(self.path):
            return "no process is working on this run"
        text = f"{action} {machine or (entry.name if entry else '')}".strip()
        if any(sent.text == text and sent.answer is None and now - sent.at < _ON_ITS_WAY for sent in self.asked):
            return ""
        try:
            identity = leave_request(self.path, action, machine, entry and as_listed(entry))
        except BadInput as error:
            return error.message
        self.asked.append(SentRequest(identity, text, now))
        return ""

    @property
    def records(self) -> list[CommandRecord]:
        """The requests, and the commands of the run's own process, for the command log."""
        line = command_about(self.path, "runs", "ask")
        sent = [CommandRecord("the run", f"{line} {one.text}", one.result, one.at) for one in self.asked]
        return [*sent, *commands_of(self.path)]

    def news(self, picture: Picture) -> Iterator[tuple[str, RequestEvent]]:
        """Yield text and answer of the requests whose outcome has changed since the last call."""
        for request in self.asked:
            answer = picture.state.requests.get(request.id)
            if answer is not None and (request.answer is None or answer.outcome != request.answer.outcome):
                request.answer = answer
                yield request.text, answer


def without_effect(view: RunView) -> tuple[str, ...]:
    """Return the requests that would do nothing: while the run stops, and after its last step."""
    stage = end_stage(view.state)
    if view.state.ended is not None or (not stage and ending_order(view.state) != "Stopping"):
        return ()
    changes = ("pause", "resume", "snapshot", "add", "drop")
    return changes if not stage or stage.startswith(LAST_EVALUATION) else (*changes, "stop")


class Proof:
    """Asks every machine, once the run has ended, whether any of its processes are left."""

    def __init__(self, path: Path, run_id: str, ask: Callable[..., Mapping[str, Any]] = leftovers) -> None:
        self._left = ask
        self.answers: dict[str, str] | None = None
        """By machine: empty where nothing is left, else what is left, or why it could not be asked."""
        self._path, self._run_id = path, run_id
        self.ended = threading.Event()
        """Set when the run has ended: then the machines are asked."""
        self.needed = (path / RUN_HOSTS).is_file()
        if self.needed:
            threading.Thread(target=self._ask, name="dashboard-proof", daemon=True).start()

    def _ask(self) -> None:
        try:
            hosts = without_unapproved_pythons(load_hosts(self._path / RUN_HOSTS))
            leftovers_by_machine = self._left(hosts, self._run_id, self.ended.wait)
        except MusterError as error:
            self.answers = {"the machines": error.message}
            return
        self.answers = {
            name: answer.message.removeprefix(f"{name}: ") if isinstance(answer, MusterError) else "; ".join(answer)
            for name, answer in leftovers_by_machine.items()
        }


class StopDialog(Dialog):
    """Shows the progress of a stop; closing it changes nothing."""

    def __init__(self, proof: Proof, picture: Callable[[], Picture]) -> None:
        super().__init__("Stopping")
        self._proof, self._picture = proof, picture

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_EVERY, lambda: self.query_one("#content Static", Static).update(self.content()))

    def content(self) -> Content:
        picture = self._picture()
        lines = [StatusMark.DONE.show("the run was asked to stop")]
        if picture.live or not picture.read:
            heard = ending_order(picture.state) == "Stopping"
            doing = order_stage(picture) if heard else "the run has not answered yet"
            return Content("\n").join([*lines, StatusMark.WORKING.show(doing)])
        self._proof.ended.set()
        status = picture.state.status
        saved = "" if status == "completed" or picture.launched else f"; {picture.state.saved_progress}"
        mark = LEVELS[headline(picture).level]
        lines += [mark.show(f"the run has ended ({status_word(status)}){saved}"), *self._proofs()]
        if status != "completed" and (command := picture.resume_command):
            lines += [Content(""), literal("resume it later:", "$text-muted"), literal(command, "bold")]
        return Content("\n").join(lines)

    def _proofs(self) -> list[Content]:
        if not self._proof.needed:
            return [StatusMark.DONE.show("nothing left running")]
        if self._proof.answers is None:
            return [StatusMark.WORKING.show("checking every machine for what is left running")]
        lines = []
        for name, left in self._proof.answers.items():
            mark = StatusMark.PROBLEM if left else StatusMark.DONE
            words = literal(left or "nothing left running")
            lines.append(Content.assemble(mark.show(""), " ", literal(name, "bold"), ": ", words))
        return lines


News = tuple[str, SeverityLevel]
T = TypeVar("T")


def _next_of(queue: SimpleQueue[T]) -> T | None:
    try:
        return queue.get_nowait()
    except Empty:
        return None


class ReportDialog(CommandDialog):
    """Where a report is, to be copied: its path has lines of its own, which end only after a folder.

    Args:
        line: of :func:`app.html_report.page.show_report`.
    """

    def __init__(self, line: str) -> None:
        heading, _, path = line.partition(": ")
        super().__init__(path)
        self._heading = heading.capitalize()

    def body(self) -> ComposeResult:
        yield Prose(literal(self._command, "bold"))


class Reporting:
    """Writes reports, one at a time.

    Args:
        open_url: opens a URL where the screen itself is in a browser.
    """

    def __init__(self, run_dir: Path, open_url: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._open_url = open_url
        self._news: SimpleQueue[News] = SimpleQueue()
        self._reports: SimpleQueue[ReportDialog] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start a report, unless one is being written."""
        from app.html_report.page import SERVED  # only when asked for

        if address := os.environ.get(SERVED):
            self._open_url(address)
        elif self._thread is None or not self._thread.is_alive():
            self._news.put(("writing the report", "information"))
            # Not a worker of the screen: Python would wait for it at exit.
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def news(self) -> News | None:
        """Return the next message; ``None``: there is none."""
        return _next_of(self._news)

    def report(self) -> ReportDialog | None:
        """Return the dialog that says where a report was written; ``None``: there is no further one."""
        return _next_of(self._reports)

    def _write(self) -> None:
        from app.html_report.page import show_report, write_report

        try:
            self._reports.put(ReportDialog(show_report(write_report(self._run_dir))))
        except MusterError as error:
            self._news.put((error.message, "error"))
