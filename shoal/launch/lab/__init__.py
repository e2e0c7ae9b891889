"""A lab of network namespaces: hosts, switches and shaped links on one Linux machine."""
