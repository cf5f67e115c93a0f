"""Removes everything of Muster's from a machine again, and proves that it is gone."""
