"""What programs that do not train know of recordings and of a Whisper."""
