"""Any transformers model with a loss of its own, and rows of a table: the task ``hf``."""
