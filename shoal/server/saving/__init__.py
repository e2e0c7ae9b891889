"""Periodic checkpoints of servers: their files, their folder, and writing in the background."""
