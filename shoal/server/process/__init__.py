"""The process of a server: connections, sessions, requests, its own checkpoints."""
