"""Requests of users to a run: files in its folder, and who carries them out."""
