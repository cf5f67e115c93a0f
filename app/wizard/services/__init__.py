"""What the set-up asks of machines, data and files; blocks, so it runs in threads."""
