"""How fast links and machines are."""
