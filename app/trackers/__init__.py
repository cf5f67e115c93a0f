"""Trackers: the same events as files of CSV, TensorBoard, Weights & Biases or trackio, through their own libraries.

A tracker is one more reader of the run folder, in a process of its own (``python -m app.trackers.tracking
NAMES``): it survives the terminal, ends with the run, and whatever happens to it, the run does not notice.
"""
