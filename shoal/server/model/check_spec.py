"""Which descriptions of a model a server accepts."""

from __future__ import annotations

import math

from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.protocol.frames import Refused
from shoal.server.protocol.messages import ModelSpec


def check_spec(spec: ModelSpec, max_bytes: int) -> None:
    """Refuse a slice that is too large for the server, or whose parameters do not fit into it."""
    if not spec.start <= spec.stop <= spec.size or spec.index >= spec.servers:
        raise Refused(f"slice {spec.start}:{spec.stop} of {spec.size} elements")
    if spec.split.shard >= spec.split.shards:
        raise Refused(f"shard {spec.split.shard} of {spec.split.shards}")
    if spec.split.leader_model is not None and not spec.index:
        raise Refused("server 0 is the leader: it cannot follow another model")
    if spec.norm_from_workers and not spec.rule.is_synchronous:
        raise Refused("workers send the norm of a step only where the rule is synchronous")
    itemsize = DTYPES[spec.dtype].itemsize
    elements = spec.size * (1 + partial_sums(spec)) + 4 * (spec.stop - spec.start)
    if elements * itemsize > max_bytes:
        raise Refused(f"{spec.size} elements are more than this server can hold")
    if spec.microbatches is not None and spec.microbatches % spec.rule.workers:
        raise Refused(f"{spec.microbatches} micro-batches for {spec.rule.workers} workers")
    _check_slices(spec)


def _check_slices(spec: ModelSpec) -> None:
    end = spec.start
    for held in spec.slices:
        stop = held.start + math.prod(held.shape)
        if held.start < end or stop > spec.stop or held.parameter >= spec.parameters:
            raise Refused(f"parameter {held.parameter} is not inside of this slice")
        end = stop
