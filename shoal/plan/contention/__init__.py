"""Messages that share the links of a cluster."""
