"""Which samples a member takes, and how they become batches."""
