"""Connections of two members: dialled, authenticated, sealed, kept full."""
