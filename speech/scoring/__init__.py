"""What was written beside what was meant: word errors, normalisation, predictions, samples to show."""
