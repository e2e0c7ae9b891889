"""Where a model trains: devices, links, nodes, racks, and files that describe them."""
