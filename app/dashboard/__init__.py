"""The live dashboard: a reader of the run folder that never disturbs the run."""
