"""The set-up as data: what a person chose, what was worked out from it, and the rules from state to state."""
