"""One run on machines: which member runs where, and the requests to the run."""
