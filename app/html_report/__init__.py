"""``report RUN``: one self-contained HTML file about a run."""
