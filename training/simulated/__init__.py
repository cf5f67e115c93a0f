"""Many members of a run in one process that take turns on its processor: the same trainer, strategies and bits."""
