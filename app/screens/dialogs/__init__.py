"""Dialogs of one screen of the set-up."""
