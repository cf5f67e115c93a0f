"""The six tabs, and what they share."""
