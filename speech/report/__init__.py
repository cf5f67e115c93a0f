"""What a run of speech recognition shows beyond metrics: errors by group, words, recordings."""
