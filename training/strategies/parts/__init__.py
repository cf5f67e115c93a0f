"""What several strategies are made of: fragments, outer optimizers, rounds, comparisons of weights."""
