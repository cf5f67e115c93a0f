"""Registration of the tasks, one module each. Nothing here imports torch."""
