"""A training loop of one's own with what a run has: its pieces in the process of a script."""
