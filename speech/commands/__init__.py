"""Commands for recordings and transcripts."""
