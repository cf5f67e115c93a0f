"""How gradients are made smaller on their way: a file for each compressor."""
