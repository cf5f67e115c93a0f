"""Language models: texts, conversations, packing, generation."""
