"""Messages between ranks over the links of a topology.

A message first takes its alpha, then its bytes flow along the path of links. The alpha occupies
the sender's port out and the receiver's port in, as in `schedules.collectives.cost`: k messages at
one port begin to flow after k alphas. Bytes share every link of their way fairly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoal.cluster.topology import ClusterTopology
from shoal.schedules.collectives import Collective

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
_SAME = 1e-9  # shares and moments that differ by this much, relatively, are the same


def max_min_rates(paths: Longs, capacities: Floats) -> Floats:
    """The rate of each flow; a row of `paths` has the links of a flow, padded with -1.

    A flow without links is not limited: its rate is infinite.
    """
    rates = np.full(len(paths), math.inf)
    limits = np.append(capacities, math.inf)  # the link of index -1
    left = limits.copy()
    waiting = np.arange(len(paths))
    while waiting.size:
        rows = paths[waiting]
        counts = np.bincount(rows.ravel() + 1, minlength=limits.size).astype(np.float64)
        counts = np.roll(counts, -1)  # index -1 last, as in `limits`
        shares = np.full(limits.size, math.inf)
        np.divide(left, counts, out=shares, where=counts > 0)
        shares[-1] = math.inf
        lowest = shares[rows].min(axis=1) if rows.shape[1] else np.full(waiting.size, math.inf)
        settled = _settled(rows, shares, lowest)
        rates[waiting[settled]] = lowest[settled]
        done = rows[settled]
        if done.shape[1] and np.isfinite(lowest[settled]).all():
            taken = np.repeat(lowest[settled], done.shape[1])
            left[:-1] -= np.bincount(done.ravel() + 1, taken, minlength=limits.size)[1:]
            np.maximum(left, 0.0, out=left)
        waiting = waiting[~settled]
    return rates


def _settled(rows: Longs, shares: Floats, lowest: Floats) -> Flags:
    """Flows whose narrowest link is the narrowest of all flows on it."""
    if not np.isfinite(lowest).all():
        return ~np.isfinite(lowest)
    on_narrower = np.zeros(shares.size, bool)  # links with a flow that is slower elsewhere
    slower = lowest[:, None] < shares[rows] * (1 - _SAME)
    on_narrower[rows[slower]] = True
    full = ~on_narrower
    full[-1] = False
    return np.asarray(full[rows].any(axis=1))


class FlowNetwork:
    """Flows in progress. Tags are the caller's numbers for them."""

    def __init__(self, capacities: Floats):
        self.capacities = np.asarray(capacities, np.float64)
        self.carried_bytes = np.zeros(self.capacities.size)  # by link
        self.now_s = 0.0
        self._paths: Longs = np.empty((0, 1), np.int64)
        self._sizes: Floats = np.empty(0)
        self._left: Floats = np.empty(0)
        self._rates: Floats = np.empty(0)
        self._tags: Longs = np.empty(0, np.int64)
        self._changed = np.zeros(self.capacities.size + 1, bool)  # links; the last is padding

    def __len__(self) -> int:
        return int(self._tags.size)

    def start(self, paths: Longs, sizes: Floats, tags: Longs) -> None:
        """Flows that begin now."""
        width = max(self._paths.shape[1], paths.shape[1])
        self._paths = np.concatenate([_padded(self._paths, width), _padded(paths, width)])
        self._sizes = np.concatenate([self._sizes, sizes])
        self._left = np.concatenate([self._left, sizes])
        self._rates = np.concatenate([self._rates, np.zeros(len(sizes))])
        self._tags = np.concatenate([self._tags, tags])
        self._changed[paths.ravel()] = True
        on_links = np.repeat(sizes, paths.shape[1])
        links = self.capacities.size
        self.carried_bytes += np.bincount(paths.ravel() + 1, on_links, minlength=links + 1)[1:]

    def next_end_s(self) -> float:
        """When the next flow ends if none begins before; infinite where there are none."""
        if not self._tags.size:
            return math.inf
        self._refresh()
        return self.now_s + float(self._remaining_s().min())

    def advance(self, to_s: float) -> Longs:
        """Let time pass; the tags of the flows that have ended, in the order of their start."""
        if not self._tags.size:
            self.now_s = to_s
            return self._tags
        self._refresh()
        passed_s = to_s - self.now_s
        self.now_s = to_s
        ended = self._remaining_s() <= passed_s + _SAME * max(passed_s, to_s * 1e-3)
        moving = np.isfinite(self._rates)
        self._left[moving] -= self._rates[moving] * passed_s
        ended |= self._left <= _SAME * self._sizes
        return self._remove(ended)

    def _remove(self, ended: Flags) -> Longs:
        tags = self._tags[ended]
        self._changed[self._paths[ended].ravel()] = True
        for name in ("_paths", "_sizes", "_left", "_rates", "_tags"):
            setattr(self, name, getattr(self, name)[~ended])
        return tags

    def _remaining_s(self) -> Floats:
        found = np.zeros(self._left.size)
        np.divide(self._left, self._rates, out=found, where=np.isfinite(self._rates))
        return found

    def _refresh(self) -> None:
        """New rates for the flows that share links, or links of links, with what changed."""
        if not self._changed.any():
            return
        self._changed[-1] = False
        reached = self._changed[self._paths].any(axis=1) | (self._rates == 0.0)
        links = 0
        while (now := int(np.count_nonzero(self._changed))) != links:
            links = now
            self._changed[self._paths[reached].ravel()] = True
            self._changed[-1] = False
            reached |= self._changed[self._paths].any(axis=1)
        self._rates[reached] = max_min_rates(self._paths[reached], self.capacities)
        self._changed[:] = False


def _padded(paths: Longs, width: int) -> Longs:
    missing = width - paths.shape[1]
    return np.pad(paths, ((0, 0), (0, missing)), constant_values=-1) if missing else paths


class Routes:
    """Paths and alphas of a topology as arrays, found once for each pair of ranks.

    `order[r]` is the device of the cluster that rank r of a group runs on.
    """

    def __init__(self, topology: ClusterTopology, order: Sequence[int] | None = None):
        links = topology.links
        self.names = [link.name for link in links]
        self.capacities = np.array([link.bytes_per_s for link in links], np.float64)
        self._alphas = np.array([link.alpha_s for link in links], np.float64)
        self._topology = topology
        self._order = order
        self._rows: dict[tuple[int, int], int] = {}
        self._found: list[Sequence[int]] = []
        self.paths: Longs = np.empty((0, 1), np.int64)  # padded with -1
        self.alphas_s: Floats = np.empty(0)

    def rows(self, src: Longs, dst: Longs) -> Longs:
        """The row in `paths` and `alphas_s` of each pair."""
        rows = [self._row(pair) for pair in zip(src.tolist(), dst.tolist(), strict=True)]
        if len(self.paths) < len(self._found):
            width = max(1, *(len(path) for path in self._found))
            self.paths = np.full((len(self._found), width), -1, np.int64)
            for row, path in enumerate(self._found):
                self.paths[row, : len(path)] = path
            self.alphas_s = np.append(self._alphas, 0.0)[self.paths].sum(axis=1)
        return np.array(rows, np.int64)

    def _row(self, pair: tuple[int, int]) -> int:
        row = self._rows.get(pair)
        if row is None:
            src, dst = pair if self._order is None else (self._order[r] for r in pair)
            row = self._rows[pair] = len(self._found)
            self._found.append(self._topology.path(src, dst) if src != dst else ())
        return row


class MessageNetwork:
    """Messages in progress: first alphas at ports, then bytes on links."""

    def __init__(self, routes: Routes, ranks: int):
        self._routes = routes
        self._links = routes.capacities.size
        self._ranks = ranks
        self._flows = FlowNetwork(np.concatenate([routes.capacities, np.ones(2 * ranks)]))
        self._waiting: dict[int, tuple[int, float]] = {}  # by tag: the row of its path, its bytes
        self._tag = 0
        self._owner: dict[int, int] = {}  # the caller's tag of a flow of bytes or alphas

    @property
    def carried_bytes(self) -> Floats:
        """Bytes that each link has carried, or began to."""
        return self._flows.carried_bytes[: self._links]

    def start(
        self, src: Longs, dst: Longs, sizes: Floats, tags: Longs, repeats: Longs | None = None
    ) -> None:
        """Messages that begin now; one that stands for many takes `repeats` alphas."""
        rows = self._routes.rows(src, dst)
        alphas_s = self._routes.alphas_s[rows] * (1 if repeats is None else repeats)
        numbers = np.arange(self._tag, self._tag + len(tags))
        self._tag += len(tags)
        self._owner.update(zip(numbers.tolist(), tags.tolist(), strict=True))
        late = (alphas_s > 0) | (sizes <= 0)
        waiting = zip(rows[late].tolist(), sizes[late].tolist(), strict=True)
        self._waiting.update(zip(numbers[late].tolist(), waiting, strict=True))
        ports = np.stack([src, self._ranks + dst], axis=1) + self._links
        self._flows.start(ports[late], alphas_s[late], numbers[late])
        if not late.all():
            paths = self._routes.paths[rows[~late]]
            self._flows.start(paths, sizes[~late], numbers[~late])

    def next_end_s(self) -> float:
        return self._flows.next_end_s()

    def advance(self, to_s: float) -> list[int]:
        """Let time pass up to the next end at most; the tags of messages that have arrived."""
        ended = self._flows.advance(to_s).tolist()
        begun = [n for n in ended if n in self._waiting and self._waiting[n][1] > 0]
        if begun:
            rows, sizes = zip(*(self._waiting[n] for n in begun), strict=True)
            paths = self._routes.paths[np.array(rows)]
            self._flows.start(paths, np.array(sizes, np.float64), np.array(begun))
        going_on = set(begun)
        for number in ended:
            self._waiting.pop(number, None)
        return [self._owner.pop(number) for number in ended if number not in going_on]


RoundTime = tuple[float, Floats]  # seconds, and the bytes that each link carries
TimeOfRound = Callable[[Longs, Longs, Floats], RoundTime]  # from src, dst and bytes


@dataclass(frozen=True)
class MessageTable:
    """The messages of a schedule, sorted by round: transfers of one pair travel as one."""

    ranks: int
    num_rounds: int
    round: Longs
    src: Longs
    dst: Longs
    chunks: Floats

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = np.searchsorted(self.round, np.arange(self.num_rounds + 1)).tolist()
        return starts

    def of_round(self, number: int) -> slice:
        return slice(self._starts[number], self._starts[number + 1])

    def sum_rounds(
        self, numbers: Iterable[int], chunk: float, timed: TimeOfRound, before: RoundTime
    ) -> RoundTime:
        """These rounds of chunks of so many bytes, after others; equal ones are timed once."""
        known: dict[bytes, RoundTime] = {}
        seconds, carried = before
        for number in numbers:
            rows = self.of_round(number)
            columns = (self.src[rows], self.dst[rows], self.chunks[rows])
            key = b"".join(column.tobytes() for column in columns)
            if key not in known:
                known[key] = timed(columns[0], columns[1], columns[2] * chunk)
            took_s, moved = known[key]
            seconds += took_s
            carried += moved
        return seconds, carried


def message_table(collective: Collective) -> MessageTable:
    table = collective.table
    ranks = collective.ranks
    wire = table.src != table.dst
    when, src, dst = (c[wire].astype(np.int64) for c in (table.round, table.src, table.dst))
    key, chunks = np.unique((when * ranks + src) * ranks + dst, return_counts=True)
    pairs = (key // (ranks * ranks), key // ranks % ranks, key % ranks)
    return MessageTable(ranks, table.num_rounds, *pairs, chunks.astype(np.float64))


def simulate_collective(collective: Collective, num_bytes: float, routes: Routes) -> float:
    """Seconds of one call on vectors of `num_bytes`.

    Every message is a flow that shares links with the others of its round; a round begins when the
    one before has ended on all ranks. Equal rounds are simulated once, so that a ring over 1,024
    ranks is as cheap as one round of it.
    """
    table = message_table(collective)

    def timed(src: Longs, dst: Longs, sizes: Floats) -> RoundTime:
        if len(src) == 1:
            return _one_message(src, dst, float(sizes[0]), routes)
        network = MessageNetwork(routes, table.ranks)
        network.start(src, dst, sizes, np.arange(len(src)))
        end_s = 0.0
        while (at_s := network.next_end_s()) < math.inf:
            network.advance(at_s)
            end_s = at_s
        return end_s, network.carried_bytes

    nothing = (0.0, np.zeros(routes.capacities.size))
    chunk = collective.chunk_bytes(num_bytes)
    return table.sum_rounds(range(table.num_rounds), chunk, timed, nothing)[0]


def _one_message(src: Longs, dst: Longs, num_bytes: float, routes: Routes) -> RoundTime:
    """A message that has its path for itself."""
    row = routes.rows(src, dst)
    path = routes.paths[row][0]
    path = path[path >= 0]
    rate = float(routes.capacities[path].min(initial=math.inf))
    carried = np.zeros(routes.capacities.size)
    carried[path] = num_bytes
    return float(routes.alphas_s[row][0]) + num_bytes / rate, carried
