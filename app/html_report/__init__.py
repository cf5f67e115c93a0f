"""``report RUN``: one self-contained HTML file about a run."""

from app.html_report.open import open_report as open_report
from app.html_report.open import served_report as served_report
from app.html_report.open import show_report as show_report
from app.html_report.page import write_report as write_report

__all__ = ["open_report", "served_report", "show_report", "write_report"]
