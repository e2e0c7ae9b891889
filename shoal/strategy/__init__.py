"""Strategies as values: terms, the notation, and what options may be."""
