"""Snapshots on disk: written in the background, hashed, whole or not at all."""
