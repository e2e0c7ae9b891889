"""The number of one life of a worker: which start of its process it is, and random bits.

generation 0 is the process that was there at the start; a worker that is started again has a
higher one. Of two processes that claim to be one worker, the one that was started later is right.
"""

from __future__ import annotations

import secrets

_RANDOM_BITS = 48
MAX_GENERATION = (1 << 15) - 1


def new_incarnation(generation: int = 0) -> int:
    return min(generation, MAX_GENERATION) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def generation_of(incarnation: int) -> int:
    return incarnation >> _RANDOM_BITS
