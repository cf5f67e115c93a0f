"""One stage of a model: its own class, with stand-ins for what other stages compute."""
