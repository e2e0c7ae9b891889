"""single, ddp, zero and mapreduce: every step ends with the sum of all replicas' gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.schedules.addition_tree import subtrees_sent
from shoal.schedules.buffer_layout import (
    DEFAULT_BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LARGE_BYTES,
    held_shards,
    room_elements,
    sharded_bucket_bytes,
)
from shoal.schedules.steps.compressed import (
    compressed_exchanges,
    most_in_flight,
    residuals,
    slice_memory,
)
from shoal.schedules.steps.step import (
    BARRIER,
    Exchange,
    HostCopy,
    Messages,
    Passes,
    Sizes,
    StepSchedule,
    What,
    When,
    Where,
    held_of,
)
from shoal.schedules.steps.tensor_layout import Buckets
from shoal.schedules.steps.worker_model import WorkerModel

MASTER = 0  # of mapreduce: the replica that updates


def single(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    sizes: Sizes = model.plain()
    if model.exact_microbatches is not None:
        sizes = {**sizes, **model.exact(rank, replicas, DEFAULT_BUCKET_BYTES)}
    return StepSchedule(held_of(sizes), updated=model.layout.trained)


def ddp(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """Buckets are all-reduced while backward runs; each replica updates its own copy."""
    layout = model.layout
    bucket_bytes = int(term.bucket_mb * (1 << 20))
    buckets = first_is_small(model, bucket_bytes)
    sizes: Sizes
    reduced = gradients_of(model, "all_reduce", buckets)
    exchanges: tuple[Exchange, ...] = (reduced._replace(algorithm=term.collective_algorithm),)
    if model.exact_microbatches is not None:
        sizes = model.exact(rank, replicas, bucket_bytes)
        exchanges = (subtrees_of(model, replicas),)
    elif term.compress is not None:
        bodies = [without_header(model, bucket) for bucket in buckets]
        memory = [slice_memory(term.compress, model, one, rank, replicas) for one in bodies]
        sizes = {
            What.GRADIENTS: model.bucketed_gradients(buckets),
            What.COPIES: model.gap_index,
            What.RESIDUALS: residuals(model, memory),
            What.IN_FLIGHT: most_in_flight(memory),
        }
        exchanges = (
            header_of(model, layout.header_size * model.width),
            *compressed_exchanges(
                term.compress, layout, bodies, replicas, What.GRADIENTS, When.IN_BACKWARD
            ),
        )
    elif term.may_share_weights and (
        shared := model.with_shared_weights(term.shared_weights, rank, replicas, buckets)
    ):
        sizes = shared
        exchanges = (slices_of(model),)
    else:
        sizes = {What.GRADIENTS: model.bucketed_gradients(buckets, LARGE_BYTES)}
    return StepSchedule(
        held_of({**model.plain(), **sizes}),
        exchanges if replicas > 1 else (),
        updated=layout.trained,
    )


def zero(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """Buckets are reduced to the owners of their parameters, which update and hand them out."""
    layout = model.layout
    held = held_shards(rank, replicas, term.shard_copies)
    shards = layout.shards(replicas)
    updated = sum(model.trained_in(shards[shard]) for shard in held)
    sizes: dict[What, float] = model.plain()
    if model.exact_microbatches is not None:
        sizes |= model.exact(rank, replicas, DEFAULT_BUCKET_BYTES)
    else:
        buckets = first_is_small(model, DEFAULT_BUCKET_BYTES)
        wanted = term.shared_weights if term.may_share_weights else False
        if shared := model.with_shared_weights(wanted, rank, replicas, buckets):
            return StepSchedule(held_of({**sizes, **shared}), (slices_of(model),), updated=updated)
        gradients = layout.zero_gradients(
            term.stage,
            (rank, replicas, term.shard_copies),
            model.accumulates,
            model.is_stage,
            term.offload,
        )
        sizes[What.GRADIENTS] = gradients * model.width
    sizes[What.OPTIMIZER] = sum(model.state_in(shards[shard]) for shard in held)
    if term.shards_parameters(replicas):
        here = [] if term.offload else held
        length = sum(shards[shard].stop - shards[shard].start for shard in here)
        sizes[What.PARAMETERS] = length * model.parameter_bytes + model.untrained
        gathered = layout.zero_gathered(replicas, here, model.is_cast)
        sizes[What.GATHERED] = gathered * model.parameter_bytes
    exchanges = _zero_exchanges(term, model, replicas, rank)
    passes = copies_into_buckets(model, _backwards(term, model)) if exchanges else ()
    step = StepSchedule(held_of(sizes), exchanges, updated=updated, passes=passes)
    if not term.offload:
        return step
    sizes |= _on_device(term, model, layout.update_chunks(rank, replicas), sizes)
    on_host = held_of(_on_host(term, model, shards[rank]), Where.HOST)
    copies = _host_copies(term, model, shards[rank])
    return step._replace(held=(*held_of(sizes), *on_host), host_copies=copies)


def _backwards(term: Any, model: WorkerModel) -> int:
    """How often gradients are reduced in a step."""
    return model.microbatches if term.stage > 1 else 1


def _on_host(term: Any, model: WorkerModel, where: slice) -> dict[What, float]:
    """With offload: what of a slice of the buffer lies in the host's memory."""
    length = where.stop - where.start
    keeps_gradients = term.stage > 1 and model.exact_microbatches is None
    return {
        What.OPTIMIZER: model.state_in(where),
        What.GRADIENTS: length * model.width if keeps_gradients else 0.0,
        What.PARAMETERS: length * model.parameter_bytes if term.stage == 3 else 0.0,
    }


def _on_device(term: Any, model: WorkerModel, chunks: Sequence[slice], sizes: Sizes) -> Sizes:
    """With offload: a chunk is updated while the next comes up and the one before goes down."""
    parts = [_on_host(term, model, chunk) for chunk in chunks]
    pairs = list(itertools.pairwise([*parts, dict.fromkeys(What, 0.0)]))
    two = {
        what: max((one[what] + following[what] for one, following in pairs), default=0.0)
        for what in _on_host(term, model, slice(0, 0))
    }
    down = [one[What.OPTIMIZER] + one[What.PARAMETERS] for one in parts[:-1]]
    return {
        What.OPTIMIZER: two[What.OPTIMIZER],
        What.GRADIENTS: max(sizes[What.GRADIENTS], two[What.GRADIENTS]),
        What.PARAMETERS: sizes[What.PARAMETERS] + two[What.PARAMETERS],
        What.IN_FLIGHT: max(down, default=0.0),
    }


def _host_copies(term: Any, model: WorkerModel, where: slice) -> tuple[HostCopy, ...]:
    """With offload: weights come up where they are gathered, and all of it for the update."""
    held = _on_host(term, model, where)
    layout = model.layout
    body = layout.size - layout.offset
    gathered = held[What.PARAMETERS] * (2 * body - layout.first_units) / body
    gradients = held[What.GRADIENTS]
    passes = model.microbatches
    updated = sum(held.values())
    return (
        HostCopy("up", passes * gathered, When.BEFORE_UNIT),
        HostCopy("down", passes * gradients, When.IN_BACKWARD),
        HostCopy("up", (passes - 1) * gradients, When.IN_BACKWARD),
        HostCopy("up", updated, When.AFTER_BACKWARD),
        HostCopy("down", updated - gradients, When.AFTER_BACKWARD),
    )


def _zero_exchanges(
    term: Any, model: WorkerModel, replicas: int, rank: int
) -> tuple[Exchange, ...]:
    if replicas == 1:
        return ()
    layout = model.layout
    passes = _backwards(term, model)
    if model.exact_microbatches is not None:
        exchanges = [subtrees_of(model, replicas)]
    else:
        reduced = gradients_of(model, "reduce", layout.zero_buckets(replicas))
        head = header_of(model, layout.header_size * model.width)
        if term.stage > 1:  # zero(1) keeps all gradients until backward has ended
            bucket_bytes = sharded_bucket_bytes(model.gradient_buffer, replicas)
            room = room_elements(bucket_bytes, int(model.width))
            reduced = reduced._replace(room=room * model.width)
        exchanges = [reduced._replace(times=passes), head._replace(times=passes)]
    shards = layout.shards(replicas)
    if copies := len(held_shards(rank, replicas, term.shard_copies)) - 1:
        own = (shards[rank].stop - shards[rank].start) * model.width
        sent = (Messages(copies, own),)
        exchanges.append(Exchange(What.GRADIENTS, "send", sent, When.AFTER_BACKWARD))
    if term.elastic:
        exchanges.append(barrier_at(What.GRADIENTS, When.AFTER_BACKWARD))
    body = layout.size - layout.offset
    if term.stage == 3:  # all but the first units are gathered in backward again
        share = layout.cast_share if model.is_cast else 1.0
        unit = min(layout.largest_unit, body) or body
        gathered = unit * model.parameter_bytes * share
        units = (
            Messages(body / unit, gathered),
            Messages((body - layout.first_units) / unit, gathered),
        )
        exchanges.append(
            Exchange(
                What.PARAMETERS, "all_gather", units, When.BEFORE_UNIT, times=model.microbatches
            )
        )
    else:
        lengths = [one.stop - one.start for one in shards if one.stop > one.start]
        calls = tuple(Messages(1, length * model.parameter_bytes) for length in lengths)
        exchanges.append(Exchange(What.PARAMETERS, "broadcast", calls, When.AFTER_UPDATE))
    return tuple(exchanges)


def mapreduce(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """Gradients are reduced to the master, which alone updates, and sends the weights."""
    if term.batch == "full":  # those of all batches are added up
        model = replace(model, accumulates=True)
    sizes: dict[What, float] = model.plain()
    if replicas == 1:
        return StepSchedule(held_of(sizes), updated=model.layout.trained)
    is_master = rank == MASTER
    buckets = model.layout.filled(DEFAULT_BUCKET_BYTES)
    shared = model.with_shared_weights(term.shared_weights, rank, replicas, buckets)
    if shared is not None:
        updated = model.layout.trained / replicas
        return StepSchedule(held_of({**sizes, **shared}), (slices_of(model),), updated=updated)
    sizes[What.GRADIENTS] = model.bucketed_gradients(buckets)
    sizes[What.OPTIMIZER] = model.whole_state if is_master else sum(model.first_state)
    weights = (Messages(1, model.weights),)
    return StepSchedule(
        held_of(sizes),
        (
            gradients_of(model, "reduce", buckets),
            Exchange(What.PARAMETERS, "broadcast", weights, When.AFTER_UPDATE),
        ),
        updated=model.layout.trained if is_master else 0.0,
        passes=copies_into_buckets(model),
    )


def first_is_small(model: WorkerModel, bucket_bytes: int) -> list[Buckets]:
    """The bucket that is full first is small, so that communication starts early."""
    return model.layout.filled(bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES))


def without_header(model: WorkerModel, bucket: Buckets) -> Buckets:
    """What is compressed of a bucket: the header travels as it is."""
    where = slice(max(bucket.where.start, model.layout.offset), bucket.where.stop)
    return bucket._replace(where=where)


def gradients_of(model: WorkerModel, kind: str, buckets: Sequence[Buckets]) -> Exchange:
    calls = tuple(Messages(one.number, one.elements * model.width) for one in buckets)
    return Exchange(What.GRADIENTS, kind, calls, When.IN_BACKWARD)


def copies_into_buckets(model: WorkerModel, times: int = 1) -> tuple[Passes, ...]:
    """Of large gradients, which ddp leaves in their place on a CPU; a GPU copies meanwhile."""
    if not (model.on_cpu and (copied := model.layout.in_place(LARGE_BYTES))):
        return ()
    return (Passes(What.GRADIENTS.value, times * 2 * copied * model.width),)


def barrier_at(what: What, when: When) -> Exchange:
    return Exchange(what, BARRIER, (Messages(1, 0.0),), when)


def slices_of(model: WorkerModel) -> Exchange:
    """Of workers that share their weights: each adds up its slice and updates it for all."""
    calls = (Messages(1, (model.layout.size - model.layout.offset) * model.width),)
    return Exchange(What.GRADIENTS, "reduce_scatter", calls, When.AFTER_BACKWARD)


def header_of(model: WorkerModel, num_bytes: float) -> Exchange:
    """The loss, and a flag for each tensor, in a call of their own."""
    return Exchange(What.GRADIENTS, "all_reduce", (Messages(1, num_bytes),), When.AFTER_BACKWARD)


def subtrees_of(model: WorkerModel, replicas: int) -> Exchange:
    """exact=True: the sums of all replicas' subtrees are gathered."""
    assert model.exact_microbatches is not None
    sums = subtrees_sent(model.exact_microbatches, replicas)
    gathered = (Messages(1, replicas * sums * model.gradient_buffer),)
    return Exchange(What.GRADIENTS, "all_gather", gathered, When.AFTER_BACKWARD)
