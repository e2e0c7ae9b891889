"""A member of a chain: one copy of a server's shard, around the pure node in `server/chain/`."""
