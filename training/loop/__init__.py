"""The loop of one member: steps, evaluation, newcomers, its complete state."""
