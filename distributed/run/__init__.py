"""One run on machines: planned before it starts, asked for things while it is on, compared with its plan at the end."""
