"""The seam through which members exchange tensors; strategies know only :mod:`training.exchange.base`."""
