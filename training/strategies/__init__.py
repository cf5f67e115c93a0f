"""Communication strategies: when members exchange gradients or weights, and how they merge them."""
