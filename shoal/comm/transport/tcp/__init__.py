"""Shoal's own messages between hosts: several authenticated TCP connections for a pair of ranks."""
