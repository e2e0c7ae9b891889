"""Which layers of a model tp splits, and how."""
