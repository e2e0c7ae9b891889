"""A worker process: its place among the others, its group, its life."""
