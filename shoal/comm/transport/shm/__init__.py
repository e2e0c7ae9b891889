"""Shared memory of one host: segments, messages, buffers, and the native collectives."""
