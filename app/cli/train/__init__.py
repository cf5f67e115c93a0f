"""Commands that train: one run, a trial, a comparison, a launched script."""
