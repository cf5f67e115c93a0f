"""The hosts file, which lists the machines to use, and its schema."""
