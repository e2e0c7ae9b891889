"""Terms that say how replicas agree: a file for each, as in `shoal/sync/`."""
