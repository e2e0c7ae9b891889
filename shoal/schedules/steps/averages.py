"""localsgd, gossip and hogwild: replicas update by themselves, and their weights come together."""

from __future__ import annotations

from typing import Any

from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES
from shoal.schedules.steps.compressed import (
    compressed_exchanges,
    most_in_flight,
    residuals,
    slice_memory,
)
from shoal.schedules.steps.step import (
    NO_WAIT,
    Exchange,
    Messages,
    Passes,
    StepSchedule,
    Waits,
    What,
    When,
    held_of,
)
from shoal.schedules.steps.sums import barrier_at, header_of, slices_of
from shoal.schedules.steps.tensor_layout import Buckets
from shoal.schedules.steps.worker_model import WorkerModel
from shoal.strategy.options import outer_settings

_PASSES = 9  # of localsgd: difference (3), division (2), step from the agreement (2), its copy (2)
_OUTER_PASSES = 4  # more, of an outer optimizer
_READS = 2  # of weights that hogwild shares, in a step: forward and backward
_STEP_COUNT_BYTES = 4  # of an outer Adam, for each fragment
_PAGE_BYTES = 64
_PAGES = 2  # a page that neighbours read is written in turns


def localsgd(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """With the anchor and the outer optimizer's state.

    When replicas agree, the difference takes the place of the gradients, which are freed. An
    average under way is there beside them, with the weights that were sent.
    """
    layout = model.layout
    fragments = [Buckets(1, one) for one in layout.shards(term.fragments) if one.start < one.stop]
    number = len(fragments)
    sizes = model.plain()
    sizes[What.COPIES] = model.weights + model.gap_index
    if term.outer is not None:
        sizes[What.COPIES] += _outer_state(term.outer, model, number)
    if term.elastic:  # what a loss returns to (train/elastic_training.py)
        sizes[What.COPIES] += model.rollback
    at_once = [
        [fragments[(first + i) % number] for i in range(min(term.most_sent, number))]
        for first in range(number)
    ]
    tensors = 2 if term.overlap else 1 if term.compress else 0
    in_flight = [
        tensors * model.parameter_bytes * sum(one.elements for one in together)
        for together in at_once
    ]
    if term.compress is not None:
        compress = term.compress
        memory = [slice_memory(compress, model, one, rank, replicas) for one in fragments]
        sizes[What.RESIDUALS] = residuals(model, memory)
        for first, together in enumerate(at_once):
            of_these = [memory[(first + i) % number] for i in range(len(together))]
            in_flight[first] += most_in_flight(of_these)
    sizes[What.IN_FLIGHT] = max(in_flight)
    exchanges = _localsgd_exchanges(term, model, replicas, fragments) if replicas > 1 else ()
    passes = _PASSES + (_OUTER_PASSES if term.outer else 0)
    moved = [Passes("outer step", passes * model.weights, term.every)]
    if term.elastic:
        moved.append(Passes("copies", 2 * model.rollback, term.every))
    return StepSchedule(held_of(sizes), exchanges, updated=layout.trained, passes=tuple(moved))


def _outer_state(outer: str, model: WorkerModel, fragments: int) -> float:
    """Bytes of the state of an outer optimizer after its first step."""
    name, settings = outer_settings(outer)
    if name == "adam":
        return 2 * model.weights + fragments * _STEP_COUNT_BYTES
    return model.weights if settings["momentum"] else 0.0


def _localsgd_exchanges(
    term: Any, model: WorkerModel, replicas: int, fragments: list[Buckets]
) -> tuple[Exchange, ...]:
    """The loss travels with the weights, where something waits for them at all."""
    delay = term.steps_under_way
    loss = header_of(model, model.width)._replace(what=What.PARAMETERS, every=term.every)
    if term.compress is not None:
        sums = compressed_exchanges(
            term.compress,
            model.layout,
            fragments,
            replicas,
            What.PARAMETERS,
            When.AFTER_UPDATE,
        )
        rounds = tuple(one._replace(every=term.every, delay=delay) for one in sums)
        return rounds if delay else (*rounds, loss)
    is_apart = bool(delay) or len(fragments) > 1
    slices = fragments if is_apart else [Buckets(1, slice(0, model.layout.size))]
    calls = tuple(Messages(one.number, one.elements * model.width) for one in slices)
    mean = Exchange(
        What.PARAMETERS, "all_reduce", calls, When.AFTER_UPDATE, every=term.every, delay=delay
    )
    return (mean, loss) if is_apart and not delay else (mean,)


def gossip(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """After its update a replica averages its weights with its neighbours."""
    sizes = model.plain()
    trained = model.layout.trained
    if replicas == 1:
        return StepSchedule(held_of(sizes), updated=trained)
    waits = NO_WAIT if term.mode == "async" else Waits(neighbours=True)
    heard = _heard_by(term.graph, replicas, rank)
    calls = (Messages(heard.listeners, model.gradient_buffer),)
    mixes = Exchange(What.PARAMETERS, "mix", calls, When.AFTER_UPDATE, waits, graph=term.graph)
    returns = term.elastic and not term.lockstep
    if term.mode == "async":
        laid_out = sum(
            -(-n // _PAGE_BYTES) * _PAGE_BYTES for n in (model.weights, *model.statistics)
        )
        sizes[What.COPIES] = 3 * model.weights  # on several hosts
        if model.on_one_host:  # what is laid out, and the sum over neighbours
            sizes[What.COPIES] = laid_out + model.weights
            sizes[What.SHARED] = _PAGES * laid_out
            calls = (Messages(1, laid_out),)
        else:  # with one that it draws, and with one that draws it
            calls = (Messages(2, model.gradient_buffer),)
        mixes = mixes._replace(messages=calls)
    elif returns:  # a step is undone after a loss
        sizes[What.COPIES] = heard.buffers_of(model) + model.rollback
    elif not heard.is_uniform:
        if not term.elastic and model.shares_host(term.shared_weights):
            sizes[What.SHARED] = model.weights
        else:
            sizes[What.COPIES] = heard.buffers_of(model)
    else:
        buckets = model.layout.filled(DEFAULT_BUCKET_BYTES)
        wanted = False if term.elastic else term.shared_weights
        shared = model.with_shared_weights(wanted, rank, replicas, buckets)
        whole = [Buckets(1, slice(0, model.layout.size))]
        sizes |= shared or {
            What.COPIES: heard.buffers_of(model),
            What.GRADIENTS: model.bucketed_gradients(whole),
        }
        mixes = mixes._replace(what=What.GRADIENTS, when=When.AFTER_BACKWARD)
        if shared is not None:
            mixes = slices_of(model)
    if returns:
        undone = Passes("copies", 2 * model.rollback)
        ends = barrier_at(What.PARAMETERS, When.AFTER_UPDATE)
        return StepSchedule(held_of(sizes), (mixes, ends), updated=trained, passes=(undone,))
    return StepSchedule(held_of(sizes), (mixes,), updated=trained)


def hogwild(term: Any, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """Nothing is sent: all workers update one copy of the weights in shared memory."""
    sizes = model.plain()
    moved = (_READS + 2) * model.weights + model.gradient_buffer + 2 * model.whole_state
    calls = (Messages(1, moved),)
    shares = Exchange(What.PARAMETERS, "share", calls, When.AFTER_UPDATE, NO_WAIT)
    exchanges = (shares,) if replicas > 1 else ()
    return StepSchedule(held_of(sizes), exchanges, updated=model.layout.trained)


class _Neighbours:
    """What a replica of a graph hears and sends in a step, the mean over its period."""

    def __init__(self, listeners: float, is_uniform: bool, mixing: Any, messages: int, rank: int):
        self.listeners = listeners
        self.is_uniform = is_uniform
        self._mixing = mixing
        self._messages = messages
        self._rank = rank

    def buffers_of(self, model: WorkerModel) -> float:
        """Bytes of messages, and of a sum."""
        if self._mixing is None:
            return self._messages * model.weights
        size = model.layout.size
        return float(self._mixing.buffer_bytes(self._rank, size, model.parameter_bytes))


def _heard_by(graph: str, replicas: int, rank: int) -> _Neighbours:
    from shoal.schedules import mixing  # networkx: only where it is needed

    steps = mixing.edges_for(graph, replicas)
    listeners = sum(int((heard == rank).sum()) for heard, _ in steps) / len(steps)
    if replicas > mixing.MAX_WORKERS:
        most = max(len(steps) > 1, *(int((hears == rank).sum()) for _, hears in steps))
        return _Neighbours(listeners, False, None, most + 1, rank)
    weights = mixing.mixing_for(graph, replicas)
    return _Neighbours(listeners, weights.is_uniform, weights, 0, rank)
