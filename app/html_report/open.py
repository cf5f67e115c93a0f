"""Showing a report to the person who asked for it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from app.html_report.page import write_report

SERVED = "MUSTER_SERVED_REPORT"
"""Variable of a screen in a browser: where that browser finds the report."""


def open_report(run_dir: Path) -> str:
    """Write a run's report, open it where there is a browser, and return one line that says where it is.

    Raises:
        BadInput: there is no run, or the report cannot be written.
    """
    return show_report(write_report(run_dir))


def show_report(path: Path) -> str:
    """Open a report that is written, where there is a browser, and return one line that says where it is."""
    path = path.resolve()
    return f"report opened: {path}" if has_display() and webbrowser.open(path.as_uri()) else f"report: {path}"


def served_report() -> str:
    """Return the address of the report where this screen is in a browser, which opens no file of this machine."""
    return os.environ.get(SERVED, "")


def has_display() -> bool:
    """Whether a browser that is opened here is seen by the person: not over SSH, not from a page of ``web``."""
    if "web_driver" in os.environ.get("TEXTUAL_DRIVER", "") or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
