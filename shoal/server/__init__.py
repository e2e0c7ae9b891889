"""The parameter server: weights that live in servers, and workers that push and pull."""
