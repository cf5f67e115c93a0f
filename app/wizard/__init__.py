"""The guided set-up as a state machine without any screen, and its drawing as plain prompts."""
