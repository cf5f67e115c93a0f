"""From a task to the model that a member trains, and to the model in the run folder."""
