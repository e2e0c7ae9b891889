"""Segments: a chunk travels in pieces, so that a piece is added while the next is on the wire."""

from __future__ import annotations

SEGMENT_BYTES = 4 << 20  # smaller ones cost more in messages than they hide
_MOST_SEGMENTS = 64


def segments_for(chunk_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
    return max(1, min(_MOST_SEGMENTS, -(-chunk_bytes // segment_bytes)))
