"""The members of a run: their workers, who comes and goes, and what of that is in the run's events."""
