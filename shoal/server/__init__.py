"""The parameter server."""
