"""One connection to a machine: trust, log-in, commands, files, forwards, and why it failed."""
