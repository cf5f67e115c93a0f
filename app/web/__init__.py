"""``web``: the dashboard, or the guided set-up, in a browser of this machine."""
