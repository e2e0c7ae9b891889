"""Runs on several hosts: machines that an engine lends, and the agent on each of them."""
