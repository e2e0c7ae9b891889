"""Ranks that communicate: groups, their executors, and what is built on them."""
