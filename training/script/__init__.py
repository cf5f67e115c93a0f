"""What runs in the process of a user's own script."""
