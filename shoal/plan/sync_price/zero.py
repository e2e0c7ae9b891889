"""zero(1), zero(2), zero(3): replicas shard optimizer state, gradients too, parameters too.

Buckets are reduced to their owners while backward runs: of the last micro-batch under zero(1), of
every one under the other two, which keep no whole gradient. Then the owners broadcast what they
have updated. Under zero(3) a layer is gathered while the one before it computes, in forward and
again in backward.

Between nodes a gather has all NICs of a node, as every ring of NCCL: so do the rows of FSDP (MPT on
16 to 128 A100, and 64 H100). DeepSpeed's of 2021 had one: its rows on 96 to 280 nodes (Narayanan
et al., SC'21, table 2) move 21 to 23 GB/s a node of eight NICs at 25 GB/s, whatever the number of
nodes, where it gathers a layer a third time, after its recompute.

With elastic=True a shard is also on the `copies` workers that follow: its owner sends them the
reduced gradients, all meet in a barrier, and each updates all shards that it holds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.cluster.units import show_rate
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import CollectiveTime, on_nodes
from shoal.plan.sync_price import NO_PART, BucketTimes, SyncPrice, SyncQuestion, Timer
from shoal.schedules.buffer_layout import (
    LARGE_BYTES,
    held_shards,
    room_elements,
    sharded_bucket_bytes,
    times_settled,
)

_IN_BACKWARD = {"shoal": 1, "deepspeed": 2}  # gathers of a layer


def zero(term: Any, question: SyncQuestion) -> SyncPrice:
    if question.replicas == 1:
        return question.waiting_price()
    gathering_s = 0.0
    if term.stage == 3:  # weights are gathered in backward, too; what hides that hides no reduction
        gathering_s = _IN_BACKWARD[question.zero3_of] * _layers_gathered(question)[0].seconds
    steps = question.steps(term)
    return question.waiting_price(
        _reduced(term.stage, question, gathering_s),
        _copied(term, question, len(steps)) if term.elastic else NO_PART,
        _gathered(question) if term.stage == 3 else _spread(question),
        share=max(step.updated for step in steps) / max(1.0, question.sizes.trained),
    )


def _copied(term: Any, question: SyncQuestion, ranks: int) -> Part:
    """Each owner sends its gradients to the ranks that follow, one after the other; a barrier."""
    shard = max(_lengths(question)[:ranks])
    took = question.send(shard * question.width)
    messages = len(held_shards(0, question.replicas, term.shard_copies)) - 1
    barrier_s = question.collective("all_reduce", 1).seconds
    seconds = messages * took.seconds + barrier_s + question.meetings_s(1)
    return Part("copies", seconds, took.bound)


def _reduced(stage: int, question: SyncQuestion, gathering_s: float) -> Part:
    """Owners take turns, so that all buckets together cost what a reduce-scatter does.

    On GPUs the next bucket follows behind. CPUs wait for every bucket; without an idle core calls
    do not run beside backward, which stops for them where a bucket needs the memory of another.
    """
    if question.idle_share:
        times = question.once(_bucket_times, stage == 3)
        seconds, bound = question.exposed_buckets(times, gathering_s)
    else:
        timer: Timer = partial(question.collective, "reduce")
        if stage == 3:
            timer = partial(_by_one_nic, question, timer)
        buckets = question.sizes.zero_buckets(question.replicas)
        seconds, bound = question.buckets_in_turn(buckets, timer)
        if stage > 1:  # zero(1) keeps all gradients until backward has ended
            sizes = [bucket.elements for bucket in buckets for _ in range(bucket.number)]
            bucket_bytes = sharded_bucket_bytes(question.buffer_bytes, question.replicas)
            room = room_elements(bucket_bytes, question.width)
            seconds += question.meetings_s(times_settled(sizes, room))
    passes = question.microbatches if stage > 1 else 1
    if question.on_cores and (copied := question.sizes.in_place(LARGE_BYTES) * question.width):
        # all gradients are copied into buckets; a CPU's ddp leaves large ones in their place
        seconds += question.device.pass_s(2 * copied)
    if tensors := question.sizes.tensors:  # the loss, and a flag for each, in a call of their own
        seconds += question.collective("all_reduce", (1 + tensors) * question.width).seconds
    return Part("gradients", passes * seconds, bound)


def _bucket_times(question: SyncQuestion, by_one_nic: bool) -> BucketTimes:
    timer: Timer = partial(question.collective, "reduce")
    send: Timer = question.send
    if by_one_nic:
        timer, send = (partial(_by_one_nic, question, one) for one in (timer, send))
    buckets = question.sizes.zero_buckets(question.replicas)
    return question.bucket_times(buckets, timer, None if question.on_cores else send)


def _spread(question: SyncQuestion) -> Part:
    """Owners broadcast their shards. On CPUs one after the other; links carry all at once."""
    if not question.on_cores:
        all_at_once = question.collective("all_gather", question.parameter_bytes)
        return Part("weights", all_at_once.seconds, all_at_once.bound)
    width = question.precision.parameter_bytes
    shards = _lengths(question)
    took = [question.collective("broadcast", width * shard) for shard in shards if shard]
    seconds = sum(one.seconds for one in took) + question.meetings_s(1)
    return Part("weights", seconds, took[0].bound)


def _layers_gathered(question: SyncQuestion) -> tuple[CollectiveTime, CollectiveTime]:
    """All layers, each in a call of its own, and one of them."""
    all_bytes = question.parameter_bytes * question.sizes.cast_share
    layer_bytes = question.layer_parameters * question.precision.parameter_bytes
    layer_bytes = min(layer_bytes * question.sizes.cast_share, all_bytes) or all_bytes
    one = _by_one_nic(question, partial(question.collective, "all_gather"), layer_bytes)
    calls = all_bytes / max(1.0, layer_bytes)
    return one._replace(seconds=calls * one.seconds), one


def _by_one_nic(question: SyncQuestion, timer: Timer, num_bytes: float) -> CollectiveTime:
    """A call of zero(3), all of whose bytes enter and leave every node by one NIC."""
    took, nic = timer(num_bytes), question.node.nic
    is_apart = on_nodes(question.cluster, question.group).is_apart
    if nic is None or not is_apart or question.zero3_of == "shoal":
        return took
    least, moving_s = timer(1), num_bytes / nic.rate
    words = f"one {nic.name} a node ({show_rate(nic.rate)})"
    slow = CollectiveTime(least.seconds + moving_s, words)
    if least.seconds > moving_s:
        slow = least._replace(seconds=slow.seconds)
    return max(took, slow)


def _gathered(question: SyncQuestion) -> Part:
    """Every micro-batch gathers all layers in both passes; the first of a pass waits in full."""
    took, first = _layers_gathered(question)
    backward_s = question.hidden_s
    whole_s = question.backward_s or 1.0
    forward_s = question.compute_s / question.microbatches - question.backward_s
    forward_s = max(0.0, forward_s) * backward_s / whole_s
    again_s = _IN_BACKWARD[question.zero3_of] * took.seconds
    seconds = question.beside_s(took.seconds, first.seconds, forward_s)
    seconds += question.beside_s(again_s, first.seconds, backward_s)
    return Part("weights", question.microbatches * seconds, took.bound)


def _lengths(question: SyncQuestion) -> list[float]:
    """Elements of each shard."""
    return [shard.stop - shard.start for shard in question.sizes.shards(question.replicas)]
