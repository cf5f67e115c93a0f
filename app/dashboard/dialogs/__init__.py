"""Dialogs over the dashboard: requests to the run, and the next steps after it."""
