"""What a machine and a job need, what was seen, and what mends it."""
