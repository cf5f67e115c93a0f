"""Commands about runs: list, watch, ask, stop."""
