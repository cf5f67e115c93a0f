"""The guided set-up's screens: each draws one step of :mod:`app.wizard.state.state` and sends actions, nothing else."""
