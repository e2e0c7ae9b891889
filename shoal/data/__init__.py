"""Which samples each replica trains on, and in which order."""
