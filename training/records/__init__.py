"""Documents of a run: its plan, its events, its folder. Imports no torch."""
