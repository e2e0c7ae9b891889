"""Checkpoints of a job, of servers, and of what is averaged."""
