"""Whisper: the model, the features it takes, the samples it learns from, and what it writes."""
