"""Autograd mappings between activations that all ranks of a tp group have and sharded ones.

                     forward          backward
    copy             nothing          all-reduce      before a column-parallel layer
    reduce           all-reduce       nothing         behind a row-parallel layer
    gather           all-gather       take own shard  a sharded activation that is used in full
    scatter          take own shard   all-gather      a full activation, for a row-parallel layer
    gather_sequence  all-gather       reduce-scatter  rows of a sequence, before a column layer
    reduce_scatter   reduce-scatter   all-gather      behind a row layer, to rows of a sequence

What is the same on all ranks on one side of a mapping has the same gradient on all of them. The
gradient of a mapping is the mapping in the other direction, so second derivatives are right, too.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.split.mapping import all_reduced, mapped
from shoal.replica.tensor.shard_spec import ShardSpec


def copy(x: Tensor, group: Group) -> Tensor:
    return mapped(x, lambda x: x.view_as(x), partial(all_reduced, group=group))


def reduce(x: Tensor, group: Group) -> Tensor:
    return mapped(x, partial(all_reduced, group=group), lambda grad: grad)


def gather(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.all_gather, group=group), partial(spec.take_shard, rank=group.rank)
    )


def scatter(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.take_shard, rank=group.rank), partial(spec.all_gather, group=group)
    )


def gather_sequence(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.all_gather, group=group), partial(spec.reduce_scatter, group=group)
    )


def reduce_scatter(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    return mapped(
        x, partial(spec.reduce_scatter, group=group), partial(spec.all_gather, group=group)
    )
