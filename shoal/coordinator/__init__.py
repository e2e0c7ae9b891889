"""The coordinator: leases, compare-and-set, watches and versions that only grow. Loads no torch."""
