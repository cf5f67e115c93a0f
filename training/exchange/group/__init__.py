"""The coordinator, and a member's connection to it."""
