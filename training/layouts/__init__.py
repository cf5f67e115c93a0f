"""How one member's model lies on its devices."""
