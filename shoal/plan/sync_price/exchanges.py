"""What the exchanges of a step take on a network: one price for each kind and moment.

    in backward       bucket by bucket; backward hides all but the last one. Packed ones follow in
                      two stages, the second of which begins when backward has ended
    after backward    one call after the other
    before a unit     gathered while the unit before it computes, in forward and again in backward
    after the update  one call after the other, divided by the steps between them; what is used
                      some steps later is hidden by them

On GPUs a reduce of a bucket follows behind the one before it, up the same trees, so that all
together cost what a reduce-scatter does; broadcasts of several owners use all links at once.
CPUs wait for every call.

Between nodes a gather has all NICs of a node, as every ring of NCCL: so do the rows of FSDP (MPT on
16 to 128 A100, and 64 H100). DeepSpeed's zero(3) of 2021 had one: its rows on 96 to 280 nodes
(Narayanan et al., SC'21, table 2) move 21 to 23 GB/s a node of eight NICs at 25 GB/s, whatever the
number of nodes, where it gathers a layer a third time, after its recompute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster.units import show_rate
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import CollectiveTime, hops, on_nodes
from shoal.plan.sync_price import SyncQuestion
from shoal.plan.sync_price.mixing import mixed
from shoal.schedules.buffer_layout import times_settled
from shoal.schedules.collectives.cost import Link, predicted_s
from shoal.schedules.steps.step import BARRIER, Exchange, Messages, What, When

_MOST_COUNTED = 128  # ranks; schedules over more are priced as the closed form of a ring
_NAMES = {"mix": "neighbours", "send": "copies", BARRIER: "copies"}
_GATHERS_IN_BACKWARD = {"shoal": 1, "deepspeed": 2}  # of a unit
_SHARED = "share"  # of one memory


class BucketTimes(NamedTuple):
    """Buckets that are reduced one after the other."""

    all_s: float
    last: CollectiveTime
    first_bytes: float
    num_bytes: float
    bound: str


@dataclass(frozen=True)
class ExchangePrices:
    """Prices of the exchanges of one step."""

    question: SyncQuestion
    exchanges: tuple[Exchange, ...]

    def parts(self) -> Iterator[Part]:
        """Those that belong to one sum have one part."""
        sent = [one for one in self.exchanges if one.kind != _SHARED]
        for (name, *_), stages in itertools.groupby(sent, key=_sum_of):
            yield self._part(name, list(stages))

    def _part(self, name: str, stages: list[Exchange]) -> Part:
        first = stages[0]
        if first.kind == "mix":
            return mixed(self.question, first)
        if first.when is When.BEFORE_UNIT:
            return Part(name, *self._before_units(first))
        if first.when is When.IN_BACKWARD and not first.packing:
            seconds, bound = self._in_backward(first)
        else:
            seconds, bound = self._in_turn(stages)
            if first.when is When.IN_BACKWARD:
                seconds -= min(self.question.hidden_s, seconds / 2)
        seconds += self.question.device.pass_s(first.packing) if first.packing else 0.0
        seconds = first.times * seconds
        if first.delay:  # each fragment has so many steps, and all of them those of a round
            step_s = self.question.compute_s
            calls = sum(call.number for call in first.messages)
            late_s = seconds - calls * first.delay * step_s
            seconds = max(0.0, late_s, seconds - first.every * step_s)
        return Part(name, seconds / first.every, bound)

    def _in_turn(self, exchanges: Iterable[Exchange]) -> tuple[float, str]:
        """The longest of them bounds it."""
        took = [self._calls(exchange) for exchange in exchanges]
        return sum(seconds for seconds, _ in took), max(took)[1]

    def _calls(self, exchange: Exchange) -> tuple[float, str]:
        question = self.question
        calls = _with_bytes(exchange)
        meetings = exchange.kind == BARRIER
        if exchange.kind == "broadcast":
            meetings = True
            if not question.on_cores:
                calls = [Messages(1, sum(one.number * one.num_bytes for one in calls))]
        times = [self._time(exchange, one.num_bytes) for one in calls]
        all_s = sum(one.number * took.seconds for one, took in zip(calls, times, strict=True))
        return all_s + question.meetings_s(meetings), _bound(calls, times)

    def _time(self, exchange: Exchange, num_bytes: float) -> CollectiveTime:
        """The algorithm that was asked for, at the rate of the narrowest hop of its ranks."""
        question = self.question
        if exchange.kind == BARRIER:
            return question.collective("all_reduce", 1)
        algorithm = exchange.algorithm
        if algorithm in (None, "auto", "hierarchical") or question.replicas > _MOST_COUNTED:
            took = question.collective(exchange.kind, num_bytes)
            return self._by_one_nic(exchange.kind, took, num_bytes)
        way = hops(question.cluster, question.group)
        narrow = min(way, key=lambda hop: hop.bytes_per_s)
        link = Link(max(hop.alpha_s for hop in way), 1 / narrow.bytes_per_s)
        num_bytes = max(1, round(num_bytes))
        seconds = predicted_s(exchange.kind, str(algorithm), question.replicas, num_bytes, link)
        return CollectiveTime(seconds, narrow.words)

    def _by_one_nic(self, kind: str, took: CollectiveTime, num_bytes: float) -> CollectiveTime:
        """A call of DeepSpeed's zero(3): all its bytes enter and leave every node by one NIC."""
        question = self.question
        nic = question.node.nic
        is_apart = on_nodes(question.cluster, question.group).is_apart
        is_slow = question.zero3_of == "deepspeed" and self._gathered() is not None
        if nic is None or not is_apart or not is_slow:
            return took
        least = question.collective(kind, 1)
        moving_s = num_bytes / nic.rate
        slow = CollectiveTime(
            least.seconds + moving_s, f"one {nic.name} a node ({show_rate(nic.rate)})"
        )
        if least.seconds > moving_s:
            slow = least._replace(seconds=slow.seconds)
        return max(took, slow)

    # ---- before a unit

    def _gathered(self) -> Exchange | None:
        return next((one for one in self.exchanges if one.when is When.BEFORE_UNIT), None)

    def _units_s(self, gathered: Exchange) -> tuple[float, float, CollectiveTime]:
        """Seconds of a forward, of a backward, and of one call."""
        forward, backward = gathered.messages
        one = self._time(gathered, forward.num_bytes)
        again = backward.number * _GATHERS_IN_BACKWARD[self.question.zero3_of]
        return forward.number * one.seconds, again * one.seconds, one

    def _before_units(self, gathered: Exchange) -> tuple[float, str]:
        """The first unit of a pass waits in full."""
        question = self.question
        there_s, back_s, one = self._units_s(gathered)
        forward_s = question.compute_s / question.microbatches - question.backward_s
        forward_s = max(0.0, forward_s) * question.hidden_s / (question.backward_s or 1.0)
        seconds = question.beside_s(there_s, one.seconds, forward_s)
        seconds += question.beside_s(back_s, one.seconds, question.hidden_s)
        return gathered.times * seconds, one.bound

    # ---- in backward

    def _in_backward(self, exchange: Exchange) -> tuple[float, str]:
        """Beside backward; without an idle core calls follow it, one after the other."""
        question = self.question
        if question.idle_share:
            return self._left_of(question.once(self._bucket_times, exchange))
        seconds, bound = self._calls(exchange)
        meetings = 1
        if exchange.room < math.inf:
            sizes = [one.num_bytes for one in exchange.messages for _ in range(int(one.number))]
            meetings += times_settled(sizes, exchange.room)
        return seconds + question.meetings_s(meetings), bound

    def _bucket_times(self, question: SyncQuestion, exchange: Exchange) -> BucketTimes:
        calls = exchange.messages
        met_s = question.meetings_s(1)
        times = [self._time(exchange, one.num_bytes) for one in calls]
        if met_s:
            times = [took._replace(seconds=took.seconds + met_s) for took in times]
        adds = times
        if exchange.kind == "reduce" and not question.on_cores:
            sends = exchange._replace(kind="send")
            behind = [self._time(sends, one.num_bytes) for one in calls]
            adds = list(map(min, times, behind))
        all_s = sum(one.number * took.seconds for one, took in zip(calls, adds, strict=True))
        all_s += times[-1].seconds - adds[-1].seconds
        num_bytes = sum(one.number * one.num_bytes for one in calls)
        return BucketTimes(all_s, times[-1], calls[0].num_bytes, num_bytes, _bound(calls, adds))

    def _left_of(self, times: BucketTimes) -> tuple[float, str]:
        """Seconds that are left of the last micro-batch's reduction, and what bounds it.

        Weights are gathered beside backward, too, and first.
        """
        question = self.question
        gathered = self._gathered()
        gathering_s = self._units_s(gathered)[1] if gathered is not None else 0.0
        gathering_s *= 1 - question.device.overlap_cost
        hiding_s = max(0.0, question.backward_s - gathering_s) * question.idle_share
        # the first bucket is ready after its share
        hiding_s *= 1 - times.first_bytes / max(1.0, times.num_bytes)
        left_s = question.beside_s(times.all_s, times.last.seconds, hiding_s)
        is_last = times.all_s - hiding_s <= times.last.seconds
        return left_s, times.last.bound if is_last else times.bound


def _sum_of(exchange: Exchange) -> tuple[str, When, str | None, int, int]:
    """What the stages of one sum have in common: the second one of packed messages follows."""
    name = "gradients" if exchange.what is What.GRADIENTS else "weights"
    name = _NAMES.get(exchange.kind, name)
    return name, exchange.when, exchange.algorithm, exchange.every, exchange.delay


def _with_bytes(exchange: Exchange) -> list[Messages]:
    if exchange.kind == BARRIER:
        return list(exchange.messages)
    return [one for one in exchange.messages if one.num_bytes]


def _bound(calls: Sequence[Messages], times: Sequence[CollectiveTime]) -> str:
    """Of the calls that take longest together."""
    if not calls:
        return ""
    pairs = zip(calls, times, strict=True)
    of, took = max(pairs, key=lambda pair: pair[0].number * pair[1].seconds)
    if not took.messages:
        return took.bound
    return f"latency of {of.number * took.messages:g} messages"
