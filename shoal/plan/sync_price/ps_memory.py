"""Memory of workers and servers under ps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shoal.plan.prediction import DeviceMemory
from shoal.plan.sync_price.base import SyncQuestion, bucketed_gradients, plain_memory
from shoal.plan.sync_price.packed import factor_rank, is_factored
from shoal.schedules.buffer_layout import PUSH_BUCKET_BYTES

_RESIDUAL_BYTES = 4
_INDEX_BYTES = 8


def shares_weights(term: Any, question: SyncQuestion) -> bool:
    """Whether workers of the host use the weights where the servers keep them."""
    takes_copies = term.replicas > 1 or (question.is_stage and term.compress is not None)
    return bool(term.update == "server" and term.lockstep and not takes_copies)


def ps_memory(term: Any, question: SyncQuestion) -> DeviceMemory:
    """Gradients are pushed from the buffer, or packed from another; weights come into an inbox.

    A server in a worker is in that worker's `buffers`; others are in `servers`.
    """
    plain = plain_memory(question)
    out = 0.0 if term.compress is None else question.buffer_bytes
    inbox = 0.0 if shares_weights(term, question) else question.buffer_bytes
    is_inside = term.placement != "servers"
    is_one_host = question.workers <= question.cluster.node.devices
    server = server_bytes(
        term, question, (is_inside or is_one_host) and shares_weights(term, question)
    )
    return replace(
        plain,
        gradients=bucketed_gradients(question, PUSH_BUCKET_BYTES),
        optimizer=0.0 if term.update == "server" else plain.optimizer,
        buffers=out + inbox + _residuals(term, question) + (server if is_inside else 0.0),
        servers=0.0 if is_inside else server * question.each,
    )


def server_bytes(term: Any, question: SyncQuestion, has_workers_weights: bool) -> float:
    """The fullest server, for one worker of a replica: weights, their sum, state, and pushes."""
    servers = question.replicas if term.placement == "workers" else term.servers
    elements = question.sizes.servers(servers)
    buffers = 1 if has_workers_weights else 2
    if term.compress is not None or term.replicas > 1:
        buffers += question.replicas  # a push of each
    state = elements * question.state_width if term.update == "server" else 0.0
    held = buffers * elements * question.precision.gradient_bytes + state
    return held + _basis(term, question) / servers


def _residuals(term: Any, question: SyncQuestion) -> float:
    """What compression has not sent, a copy of it where late pushes are dropped, and bases."""
    if term.compress is None:
        return 0.0
    sizes = question.sizes
    drops = term.quorum is not None and term.late == "drop"
    gaps = sizes.size - sizes.offset - sizes.trained
    residual = sizes.size * _RESIDUAL_BYTES * (2 if drops else 1)
    return residual + 2 * _INDEX_BYTES * gaps + _basis(term, question)


def _basis(term: Any, question: SyncQuestion) -> float:
    if term.compress is None or not is_factored(term.compress):
        return 0.0
    return math.ceil(4 * question.sizes.factors(factor_rank(term.compress)).right)
