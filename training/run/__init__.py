"""The process that runs workers: starts them, merges their events, stops them. Imports no torch."""
