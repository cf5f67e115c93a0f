"""A report as one HTML file that loads nothing: charts, their library, style and data are all inside.

Its content security policy allows only this module's scripts, by their hashes, and no connections: names and messages
of a run could do nothing even if they were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import webbrowser
from collections.abc import Callable, Iterable
from pathlib import Path

from app.html_report import sections
from app.html_report.charts import ReportChart, charts_of, steady_figures
from app.html_report.evidence import Evidence, read_evidence
from app.html_report.sections import text
from app.html_report.showcase import showcase
from app.run_view.run_series import OF_EXCHANGES
from app.task_results import results_of
from profiles.installation import shown_path
from training.records.run_files import explain_errors, finite, utc_now, write_atomically

NAME = "report.html"
SERVED = "MUSTER_SERVED_REPORT"
"""Environment variable of a screen in a browser, which cannot open local files: the report's path on the web server."""
_SCRIPTS = ("plotly-basic.min.js", "draw.js")
"""The first one is plotly.js 4.1.1 as published, in its smallest bundle, under the MIT licence."""
_HERE = Path(__file__).parent
_ON_SCREENS = ("learning-rate", "syncs", "prediction")
"""Charts that are not printed: tables have nearly the same figures."""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run atomically, and return its path.

    Args:
        run_dir: the run folder; the report of a live run covers its events so far.
        out: the file; default: ``report.html`` in the run folder.

    Raises:
        BadInput: there is no run, or the file cannot be written.
    """
    path = out or run_dir / NAME
    content = page(read_evidence(run_dir)).encode()
    with explain_errors(path, "--out"):
        write_atomically(path, content, 0o600 if out is None else 0o644)
    return path


def show_report(path: Path, open_page: Callable[[str], bool] = webbrowser.open) -> str:
    """Open a report in a browser, where the person would see one that opens on this machine, and return the line that
    says where the report is."""
    opened = has_browser() and open_page(path.resolve().as_uri())
    return f"report{' opened' * opened}: {shown_path(path)}"


def has_browser() -> bool:
    """Whether the person would see a browser that opens on this machine."""
    elsewhere = "web_driver" in os.environ.get("TEXTUAL_DRIVER", "") or "SSH_CONNECTION" in os.environ
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return not elsewhere and (sys.platform == "darwin" or bool(display))


def page(evidence: Evidence) -> str:
    """Return the whole page."""
    charts = charts_of(evidence)
    return whole_page(f"{evidence.metadata.profile} {evidence.metadata.run_id}", body(evidence, charts), charts)


def whole_page(title: str, content: str, charts: Iterable[ReportChart]) -> str:
    """Return a page around ``content``, which has the elements of these charts (:func:`figure`)."""
    scripts = tuple((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    loads = "style-src 'unsafe-inline'; img-src data: blob:; media-src data:"
    allowed = f"default-src 'none'; script-src {script_hashes(scripts)}; {loads}"
    figures = {chart.id: chart.figure for chart in charts}
    inline = "".join(f"<script>{script}</script>" for script in scripts)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{text(title)}</title>"
        f"<style>{(_HERE / 'page.css').read_text()}</style></head><body>{content}"
        f'<script type="application/json" id="figures">{embedded(figures)}</script>{inline}</body></html>\n'
    )


def figure(chart: ReportChart) -> str:
    """Return the element of a chart, with its title and note."""
    note = f"<p>{text(chart.note)}</p>" if chart.note else ""
    drawing = f'<div id="{chart.id}" class="chart"><noscript>The chart needs JavaScript.</noscript></div>'
    kind = "whole" if "yaxis2" in chart.figure["layout"] else "in-detail" if chart.id in _ON_SCREENS else ""
    marked = f' class="{kind}"' if kind else ""
    return f"<figure{marked}><figcaption>{text(chart.title)}</figcaption>{drawing}{note}</figure>"


def embedded(content: object) -> str:
    """Return JSON for a script element: no character in it can end the element."""
    document = json.dumps(finite(content), allow_nan=False, default=str, separators=(",", ":"))
    return document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_hashes(scripts: Iterable[str]) -> str:
    """Return the hashes of scripts for a content security policy."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def body(evidence: Evidence, charts: list[ReportChart]) -> str:
    """Return the visible part of the page."""
    by_id = {chart.id: figure(chart) for chart in charts}

    def shown(*names: str) -> str:
        return "".join(by_id.get(name, "") for name in names)

    curves = shown("loss", "rates", "metrics", "learning-rate", "throughput")
    exchanged = shown(*(name.replace(" ", "-") for name in OF_EXCHANGES))
    in_detail = f'<div class="charts in-detail">{exchanged}</div>' if exchanged else ""
    in_detail += sections.steady(steady_figures(evidence.state))
    titled_sections = (
        ("Result", sections.result(evidence)),
        ("Before and after", showcase(evidence.showcase)),
        *results_of(evidence.metadata.task).report_sections(evidence.path, evidence.plan),
        ("Curves", f'<div class="charts">{curves}</div>' if curves else "<p>No step was taken.</p>"),
        ("Machines", sections.machines(evidence) + shown("time")),
        ("Network", f'{sections.network(evidence)}<div class="charts">{shown("bytes", "syncs")}</div>{in_detail}'),
        ("Strategy", sections.strategy(evidence)),
        ("Predicted and measured", sections.prediction(evidence) + shown("prediction")),
        ("Warnings and errors", sections.notices(evidence)),
        ("Run it again", sections.reproduction(evidence)),
    )
    main = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in titled_sections if content)
    footer = f"<footer>Written {utc_now()} from {text(evidence.path.name)}; this page loads nothing.</footer>"
    return f"{sections.heading(evidence)}<main>{main}</main>{footer}"
