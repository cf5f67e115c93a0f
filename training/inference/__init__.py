"""A trained model in use: evaluated, or writing texts; whole, or in stages of several workers."""
