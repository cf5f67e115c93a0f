"""``train`` where an engine starts the processes."""
