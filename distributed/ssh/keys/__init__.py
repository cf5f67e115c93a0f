"""Host keys, key files, and log-in with them."""
