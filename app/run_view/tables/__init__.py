"""Tables of a run as data: each row is worked out once, and displays render it."""
