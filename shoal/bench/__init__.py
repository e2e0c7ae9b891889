"""Measurements: ratios against a peer, taken alternately in one run."""
