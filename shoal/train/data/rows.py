"""The samples of a batch, whatever its form: rows of tensors, lists of samples, objects.

a tensor              its first dimension counts samples
a tuple, list, dict   of such; where a list holds one item per sample, samples are its items
a dataclass           its fields
an object             with len and slices (a TensorDict, a batch of graphs)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from shoal.errors import BadInput
from shoal.runtime.pytree import Tree, is_record, map_fields, tensors_of

Pick = Callable[[Any], Any]


def num_rows(tree: Tree) -> int:
    """Samples in a batch: the length of its tensors, or else of its lists, which must agree."""
    lengths = {t.shape[0] for t in _leaves(tree) if isinstance(t, Tensor) and t.dim() > 0}
    if len(lengths) == 1:
        return lengths.pop()
    list_lengths = {len(items) for items in _lists(tree)}
    fitting = [n for n in sorted(list_lengths) if _fits(tree, n)]
    if len(fitting) == 1:
        return fitting[0]
    if lengths:
        raise BadInput(
            f"the tensors of a batch have different numbers of samples: {sorted(lengths)}; what "
            "has one size per sample goes into a list of samples"
        )
    objects = [leaf for leaf in _leaves(tree) if _has_rows(leaf)]
    counts = {int(getattr(leaf, "num_graphs", len(leaf))) for leaf in objects}
    if len(counts) == 1:
        return counts.pop()
    raise BadInput("a batch holds no tensor with a dimension for samples")


def take_rows(tree: Tree, ranges: Sequence[range], count: int) -> Tree:
    """The samples in `ranges` of a batch of `count`; sample 0 stands in for an empty range."""
    if [*ranges] == [range(count)] != [range(0)] and _is_tensors(tree, count):
        return tree
    return map_rows(lambda rows: take(rows, ranges), tree, count)


def reverse_rows(tree: Tree, count: int) -> Tree:
    """The same samples in reverse order."""
    return map_rows(_reversed, tree, count)


def map_rows(pick: Pick, tree: Tree, count: int) -> Tree:
    """The same batch with `pick` applied to whatever holds `count` samples."""
    has_lists = any(_is_ragged(node, count) for node in _lists(tree))
    return _map(pick, tree, count, has_lists, is_top=True)


def is_list_of_samples(tree: Tree, count: int) -> bool:
    """Whether a list holds one item per sample, rather than tensors with a row per sample."""
    return isinstance(tree, (list, tuple)) and _is_ragged(tree, count)


def take(rows: Any, ranges: Sequence[range]) -> Any:
    """The rows in `ranges`, concatenated; row 0 is the placeholder for an empty range."""
    if isinstance(rows, Tensor) and [*ranges] == [range(rows.shape[0])] != [range(0)]:
        return rows
    pieces = [rows[r.start : r.stop] if r else rows[:1] for r in ranges]
    if isinstance(rows, Tensor):
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if len(pieces) == 1 and isinstance(pieces[0], type(rows)):
        return pieces[0]
    if len(pieces) == 1 and hasattr(type(rows), "from_data_list"):
        return type(rows).from_data_list(list(pieces[0]))  # torch_geometric: a list of graphs
    if isinstance(rows, (list, tuple)) and len(pieces) > 1:
        return [item for piece in pieces for item in piece]
    raise _unsplittable(rows)


def move_to(tree: Tree, device: torch.device) -> Tree:
    """The same batch on a device; objects that have `.to` are moved by it."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    if hasattr(tree, "to") and not isinstance(tree, type):
        return tree.to(device)
    return _rebuilt(lambda value: move_to(value, device), tree)


def widen(tree: Tree) -> Tree:
    """The same batch in double precision; of objects those tensors that are their attributes."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    is_object = hasattr(tree, "to") and hasattr(tree, "__dict__")
    if not is_object or isinstance(tree, (Mapping, list, tuple)):
        return _rebuilt(widen, tree)
    wider = copy.copy(tree)
    vars(wider).update({name: widen(value) for name, value in vars(tree).items()})
    return wider


def _rebuilt(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same container with other items."""
    if isinstance(tree, (list, tuple)):
        items = [function(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        return {key: function(value) for key, value in tree.items()}
    return map_fields(function, tree) if is_record(tree) else tree


def _items(tree: Tree) -> list[Any] | None:
    """What a container holds; None of a leaf."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, (list, tuple)):
        return list(tree)
    # a dataclass that does not know itself how it is sliced and moved
    if is_record(tree) and not _has_rows(tree) and not hasattr(tree, "to"):
        return [getattr(tree, field.name, None) for field in fields(tree)]
    return None


def _map(pick: Pick, tree: Tree, count: int, has_lists: bool, is_top: bool) -> Tree:
    if isinstance(tree, Tensor):
        if tree.dim() and len(tree) != count:
            raise BadInput(
                f"a batch of {count} samples holds a tensor with {len(tree)} rows, which cannot be "
                "split: what has one size per sample goes into a list of samples"
            )
        return pick(tree) if tree.dim() else tree
    is_list = isinstance(tree, (list, tuple))
    if is_list and not is_top and (_is_ragged(tree, count) or (has_lists and len(tree) == count)):
        return pick(list(tree))
    if not is_list and not isinstance(tree, Mapping):
        if _has_rows(tree):
            return pick(tree)
        if hasattr(tree, "to"):
            raise _unsplittable(tree)
    return _rebuilt(lambda value: _map(pick, value, count, has_lists, False), tree)


def _is_ragged(items: Sequence[Any], count: int) -> bool:
    """One item per sample: not all tensors in it have a row per sample."""
    have_rows = {item.dim() > 0 for item in items if isinstance(item, Tensor)}
    if len(items) != count or len(have_rows) > 1:
        return False
    tensors = tensors_of(list(items))
    return not tensors or not all(t.dim() and len(t) == count for t in tensors)


def _fits(tree: Tree, count: int, is_top: bool = True) -> bool:
    if isinstance(tree, Tensor):
        return tree.dim() == 0 or len(tree) == count
    if isinstance(tree, (list, tuple)) and not is_top and _is_ragged(tree, count):
        return True
    return all(_fits(value, count, False) for value in _items(tree) or ())


def _lists(tree: Tree, is_top: bool = True) -> Iterator[Sequence[Any]]:
    """The lists and tuples below the outermost one."""
    if isinstance(tree, (list, tuple)) and not is_top:
        yield tree
    for value in _items(tree) or ():
        yield from _lists(value, False)


def _is_tensors(tree: Tree, count: int) -> bool:
    """Whether it is a plain tuple of so many rows each, as most batches are."""
    return type(tree) is tuple and all(type(t) is Tensor and t.shape[:1] == (count,) for t in tree)


def _leaves(tree: Tree) -> Iterator[Any]:
    items = None if isinstance(tree, Tensor) else _items(tree)
    if items is None:
        yield tree
    for item in items or ():
        yield from _leaves(item)


def _has_rows(leaf: Any) -> bool:
    """Whether an object holds samples that can be counted and sliced."""
    is_plain = isinstance(leaf, (str, bytes, Tensor))
    return not is_plain and hasattr(leaf, "__len__") and hasattr(leaf, "__getitem__")


def _reversed(rows: Any) -> Any:
    if isinstance(rows, Tensor):
        return rows.flip(0)
    return rows[::-1] if isinstance(rows, list) else rows


def _unsplittable(leaf: Any) -> BadInput:
    return BadInput(
        f"a batch holds a {type(leaf).__name__}, which cannot be split into samples: give "
        "job.batches the dataset, batch_size and collate, which then makes one of each worker's "
        "samples, and do not use micro-batches (accumulate, pp); or return a list of samples"
    )
