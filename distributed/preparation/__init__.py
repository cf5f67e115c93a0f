"""From a machine that can be reached to one that can train: checked, equipped, sent what it needs."""
