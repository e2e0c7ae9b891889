"""Communication graphs of decentralized training, and their mixing matrices."""
