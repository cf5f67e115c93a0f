"""Speech to text: recordings, Whisper, transcripts. Nothing else imports it: it is found by its entry points."""
