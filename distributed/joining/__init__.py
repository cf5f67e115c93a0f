"""Machines that dial out: one shares a code, another joins with it, and is then driven as an SSH server."""
