"""The planner: from documents of measured machines and links to a ranking of all candidate plans."""
