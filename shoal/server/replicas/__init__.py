"""Servers that hold copies of one shard: operations, and how they reach all copies."""
