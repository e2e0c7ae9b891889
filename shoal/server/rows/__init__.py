"""Rows of embedding tables, from the worker's side and between servers."""
