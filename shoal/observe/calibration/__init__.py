"""This machine as a cluster: measured once, kept in the user's cache folder."""
