"""Which transcripts a model doubts, and transcripts that a model writes."""
