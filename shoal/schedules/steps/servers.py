"""ps: servers hold the weights; workers push gradients and pull weights."""

from __future__ import annotations

import math
from typing import Any

from shoal.schedules.addition_tree import subtrees_sent
from shoal.schedules.buffer_layout import PUSH_BUCKET_BYTES
from shoal.schedules.steps.compressed import factors_of, packed_bytes
from shoal.schedules.steps.step import (
    NO_WAIT,
    Exchange,
    Messages,
    StepSchedule,
    Waits,
    What,
    When,
    Where,
    held_of,
)
from shoal.schedules.steps.worker_model import WorkerModel


def ps(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """Gradients are pushed from a segment, `out`, and weights (or sums) pulled into `inbox`.

    Without compression `out` is the gradient buffer. Where servers update and all workers wait,
    the parameters live in the servers' memory and take the place of `inbox`.
    """
    servers = replicas if term.placement == "workers" else term.servers
    slices = model.layout.server_slices(servers, by_rows=model.exact_microbatches is None)
    held = [_server_bytes(term, model, where, replicas) for where in slices]
    buckets = model.layout.filled(PUSH_BUCKET_BYTES)
    updates = term.update == "server"
    sizes = model.plain()
    sizes[What.GRADIENTS] = model.bucketed_gradients(buckets)
    if updates:
        sizes[What.OPTIMIZER] = sum(model.first_state)
    if model.exact_microbatches is not None:
        sizes[What.COPIES] = model.exact(rank, replicas, PUSH_BUCKET_BYTES)[What.COPIES]
    sizes[What.RESIDUALS] = _residuals(term, model, slices)
    out = 0 if term.compress is None else 1
    if model.exact_microbatches is not None:
        out = subtrees_sent(model.exact_microbatches, replicas)
    inbox = 0 if shares_weights(term, model) else 1
    sizes[What.SHARED] = (out + inbox) * model.gradient_buffer
    is_here = {"servers": False, "rank0": rank == 0, "workers": True}[term.placement]
    if is_here:
        sizes[What.SERVER] = held[rank]
    processes = [one for one in held for _ in range(term.replicas)]
    return StepSchedule(
        held_of(sizes),
        _exchanges(term, model, replicas, slices),
        Where.SERVER if updates else Where.WORKER,
        updated=0.0 if updates else model.layout.trained,
        servers=tuple(processes) if term.placement == "servers" else (),
    )


def shares_weights(term: Any, model: WorkerModel) -> bool:
    """Whether the model uses the weights where the servers keep them.

    Stages that get compressed sums take copies, to make those of tied weights equal. Where servers
    have replicas, a worker outlives the server that it has the weights from.
    """
    is_split_compressed = model.is_stage and term.compress is not None
    takes_copies = term.replicas > 1 or is_split_compressed or term.on != "cpu"
    return bool(term.update == "server" and term.lockstep and not takes_copies)


def quorum_count(term: Any, replicas: int) -> int:
    """A fraction of the workers, or a number of them."""
    if term.quorum > 1:
        return int(term.quorum)
    return max(1, math.ceil(float(term.quorum) * replicas - 1e-9))


def push_bytes(term: Any, model: WorkerModel, servers: int) -> float:
    """What a worker pushes in a step."""
    if term.compress is None:
        return model.gradient_buffer
    if (factors := factors_of(term.compress, model.layout, model.body)) is not None:
        return 4 * sum(factors)
    length = model.body.stop - model.body.start
    return servers * packed_bytes(term.compress, math.ceil(length / servers))


def _waits(term: Any, replicas: int) -> Waits:
    if term.quorum is not None:
        return Waits(quorum_count(term, replicas))
    if term.staleness is not None:
        return Waits(steps=term.staleness)
    return NO_WAIT if term.mode == "async" else Waits()


def _exchanges(
    term: Any, model: WorkerModel, replicas: int, slices: list[slice]
) -> tuple[Exchange, ...]:
    waits = _waits(term, replicas)
    pushes: tuple[Messages, ...]
    if term.compress is None:
        buckets = model.layout.filled(PUSH_BUCKET_BYTES)
        pushes = tuple(Messages(one.number, one.elements * model.width) for one in buckets)
    else:
        number = len(slices)
        pushes = (Messages(number, push_bytes(term, model, number) / number),)
    is_read = shares_weights(term, model) and model.on_one_host
    pulled = model.weights if term.update == "server" else model.gradient_buffer
    answer = (Messages(1, 0.0 if is_read else pulled),)
    what = What.PARAMETERS if term.update == "server" else What.GRADIENTS
    packing = 4 * model.gradient_buffer if term.compress is not None else 0.0
    return (
        Exchange(What.GRADIENTS, "push", pushes, When.IN_BACKWARD, waits, packing=packing),
        Exchange(what, "pull", answer, When.AFTER_UPDATE, waits),
    )


def _residuals(term: Any, model: WorkerModel, slices: list[slice]) -> float:
    """What compression has not sent, a copy of it where late pushes are dropped, and bases."""
    if term.compress is None:
        return 0.0
    drops = term.quorum is not None and term.late == "drop"
    residual = model.layout.size * model.residual_bytes * (2 if drops else 1)
    bases = sum(_basis(term, model, where) for where in slices)
    return residual + model.gap_index + model.unused_index(model.body) + bases


def _basis(term: Any, model: WorkerModel, where: slice) -> float:
    """Bytes of PowerSGD's basis for one server's slice."""
    factors = factors_of(term.compress, model.layout, where) if term.compress else None
    return 0.0 if factors is None else 4 * factors.right


def _server_bytes(term: Any, model: WorkerModel, where: slice, replicas: int) -> float:
    """Of one server: weights, their sum, state, and pushes."""
    is_near = term.placement != "servers" or model.on_one_host
    buffers = 1 if is_near and shares_weights(term, model) else 2
    if term.compress is not None or term.replicas > 1:
        buffers += replicas  # a push of each
    state = model.state_in(where) if term.update == "server" else 0.0
    length = float(where.stop - where.start)
    return buffers * length * model.width + state + _basis(term, model, where)
