"""Documents in and out of the planner, and corrections of measured figures."""
