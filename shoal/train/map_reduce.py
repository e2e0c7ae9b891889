"""Map and reduce as a plain function: each worker maps some items, and all reduce the results.

items     0 1 2 | 3 4 5 | 6 7          3 workers
mapped    a b c   d e f   g h          each by the worker of the item
reduced   abc     def     gh           in the order of items
gathered  abcdefgh                     on every worker
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.objects import all_gather_object

if TYPE_CHECKING:
    from shoal.train.job import Job

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_reduce(
    map_fn: Callable[[Item], Result],
    items: Iterable[Item],
    reduce_fn: Callable[[Result, Result], Result],
    job: Job | None = None,
) -> Result:
    """`reduce_fn` over `map_fn` of all items, in their order, the same on every worker of `job`.

    All workers call it with the same items; without a job it runs in this process. `reduce_fn` has
    to be associative. Results are numbers, text, bytes, tensors (which come back on the CPU), and
    lists, tuples and dicts of these. Each worker sends the reduced result of its items once.
    """
    return map_reduce_over(solo_group() if job is None else job.group, map_fn, items, reduce_fn)


def map_reduce_over(
    group: Group,
    map_fn: Callable[[Item], Result],
    items: Iterable[Item],
    reduce_fn: Callable[[Result, Result], Result],
) -> Result:
    every: Sequence[Item] = items if isinstance(items, Sequence) else list(items)
    first = len(every) * group.rank // group.size
    stop = len(every) * (group.rank + 1) // group.size
    mapped = [map_fn(every[i]) for i in range(first, stop)]
    reduced = [functools.reduce(reduce_fn, mapped)] if mapped else []
    gathered: list[list[Result]] = all_gather_object(group, reduced)
    return functools.reduce(reduce_fn, [result for results in gathered for result in results])
