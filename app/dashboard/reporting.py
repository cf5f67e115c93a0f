"""The report of a run, written beside the screen that asked for it, which leaves without waiting for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from textual.notifications import SeverityLevel

from profiles.errors import MusterError

News = tuple[str, SeverityLevel]


class Reporting:
    """Writes reports, one at a time.

    Args:
        open_url: opens an address where the person sees the screen in a browser.
    """

    def __init__(self, run_dir: Path, open_url: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._open_url = open_url
        self._news: SimpleQueue[News] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin with a report, unless one is being written."""
        from app.html_report.page import SERVED  # only when asked for

        if address := os.environ.get(SERVED):
            self._open_url(address)
        elif self._thread is None or not self._thread.is_alive():
            self._news.put(("writing the report", "information"))
            # Not a worker of the screen: Python would wait for that one before it ends.
            self._thread = Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def news(self) -> News | None:
        """Return what is to be said next; ``None``: nothing."""
        try:
            return self._news.get_nowait()
        except Empty:
            return None

    def _write(self) -> None:
        from app.html_report.page import show_report, write_report

        try:
            self._news.put((show_report(write_report(self._run_dir)), "information"))
        except MusterError as error:
            self._news.put((error.message, "error"))
