"""Requests of a connection, by kind."""
