"""Predicted memory of a member, and how a profile is made to fit it."""
