"""Gradients of a step and the optimizers that apply them."""
