"""What a model wrote, beside what was meant: predictions of a split, samples shown before and after training."""
