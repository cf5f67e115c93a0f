"""One machine in conversation: the link to it, made again when it is lost, and the agent that runs there."""
