"""Trackers: a run's events as CSV, TensorBoard, Weights & Biases or trackio data, through their own libraries.

A tracker is another reader of the run's events, in a separate process (``python -m app.trackers.tracking NAMES``): it
survives the terminal, ends with the run, and its failures do not affect the run.
"""
