"""The planner against tables of measured times."""
