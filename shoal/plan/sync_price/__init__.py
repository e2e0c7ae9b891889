"""What it costs that replicas agree: one file for each way, found by the term's name."""
