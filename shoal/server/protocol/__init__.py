"""What travels between workers and servers: frames, messages, handshake."""
