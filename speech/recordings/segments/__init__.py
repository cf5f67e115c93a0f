"""Cuts long recordings at pauses into clips, transcribes these with a model, and matches them with a transcript."""
