"""The tasks, a file each: what others know of one, and how it is made. Nothing here imports torch."""
