"""Whisper: model, input features, training samples, transcription and evaluation."""
