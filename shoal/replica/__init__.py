"""One replica's computation."""
