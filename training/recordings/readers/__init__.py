"""One reader for each kind of source; all give :class:`training.recordings.recording.Recording`."""
