"""Process entries: what ``python -m training.workers.NAME`` runs."""
