"""The worker's side of the parameter server."""
