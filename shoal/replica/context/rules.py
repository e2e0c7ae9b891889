"""The rules of cp by the names of operations; `scaled_dot_product_attention` runs over a ring."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.context.products import LOSSES, PRODUCTS
from shoal.replica.context.ring import AttentionPlan, ring_attention
from shoal.replica.context.sequence_shard import SequenceContext, SequenceShard, SequenceSpec
from shoal.replica.context.views import VIEWS
from shoal.replica.split.sharded_tensor import (
    ELEMENTWISE,
    METADATA,
    ShardedCall,
    alike,
    drawn,
    on_itself,
)

_PARAMETERS = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]


def _attention(op: ShardedCall) -> Any:
    given = dict(zip(_PARAMETERS, op.args, strict=False)) | op.kwargs
    q, k, v = given["query"], given["key"], given["value"]
    if not isinstance(q, SequenceShard) or q.spec.dim != q.dim() - 2 or q.dim() < 3:
        return NotImplemented
    if _can_ring(q, k, v, given):
        return _by_ring(op, given)
    return _with_all_keys(op, given)


def _can_ring(q: SequenceShard, k: Any, v: Any, given: dict[str, Any]) -> bool:
    """Whether queries, keys and values are of one sequence, and the mask needs no gradient."""
    mask = given.get("attn_mask")
    has_positions = all(
        isinstance(t, SequenceShard) and t.spec.is_whole and t.spec == q.spec and t.dim() == q.dim()
        for t in (q, k, v)
    )
    if not has_positions or (mask is not None and (mask.requires_grad or mask.dim() < 2)):
        return False
    a, b, c = (t.full_shape[:-2] for t in (q, k, v))
    shares_heads = bool(given.get("enable_gqa")) and a[:-1] == b[:-1] and a[-1] % b[-1] == 0
    return b == c and (a == b or shares_heads)


def _by_ring(op: ShardedCall, given: dict[str, Any]) -> SequenceShard:
    context: SequenceContext = op.context
    spec: SequenceSpec = given["query"].spec
    q, k, v = _in_precision(*(given[name].local for name in ("query", "key", "value")))
    if given.get("attn_mask") is not None and given.get("is_causal"):
        raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
    mask = _rows_of_mask(op, given.get("attn_mask"), spec)
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:  # several heads of queries share a head of keys
        heads = k.shape[-3]
        q = torch.unflatten(q, -3, (heads, groups))
        k, v = k.unsqueeze(-3), v.unsqueeze(-3)
        mask = _grouped(mask, heads, groups)
    dropout = float(given.get("dropout_p") or 0.0)
    scale = given.get("scale")
    plan = AttentionPlan(
        context.group,
        spec,
        causal=bool(given.get("is_causal")),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        mask=mask,
        dropout=dropout,
        seed=int(torch.randint(1 << 61, ())) if dropout else 0,
    )
    out = ring_attention(q, k, v, plan)
    return context.wrap(out.flatten(-4, -3) if groups > 1 else out, spec)


def _in_precision(*tensors: Tensor) -> list[Tensor]:
    """What autocast makes of the inputs of an attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _rows_of_mask(op: ShardedCall, mask: Tensor | None, spec: SequenceSpec) -> Tensor | None:
    """The rows of a mask that belong to this rank's queries, with all keys."""
    if mask is None:
        return None
    rows = mask.dim() - 2
    if isinstance(mask, SequenceShard):
        if mask.spec.dim == rows and mask.spec.same_positions(spec):
            return mask.local
        mask = mask.full()
    return mask if mask.shape[rows] == 1 else spec.at(rows).take_local(mask, op.context.rank)


def _grouped(mask: Tensor | None, heads: int, groups: int) -> Tensor | None:
    if mask is None or mask.dim() < 3:
        return mask
    is_shared = mask.shape[-3] == 1
    return mask.unsqueeze(-3) if is_shared else torch.unflatten(mask, -3, (heads, groups))


def _with_all_keys(op: ShardedCall, given: dict[str, Any]) -> SequenceShard:
    """This rank's queries over keys that are gathered, or belong to another sequence."""
    context: SequenceContext = op.context
    q: SequenceShard = given["query"]
    k, v = (t.full() if isinstance(t, SequenceShard) else t for t in (given["key"], given["value"]))
    mask = _rows_of_mask(op, given.get("attn_mask"), q.spec)
    if given.get("is_causal"):
        keys = torch.arange(k.shape[-2], device=q.device)
        mask = q.spec.local_positions(context.rank, q.device)[:, None] - q.spec.start >= keys
    options: dict[str, Any] = {n: given[n] for n in ("scale", "enable_gqa") if n in given}
    options["dropout_p"] = float(given.get("dropout_p") or 0.0)
    with context.rng.forked(q.local) if options["dropout_p"] else nullcontext():
        out = F.scaled_dot_product_attention(q.local, k, v, attn_mask=mask, **options)
    return context.wrap(out, q.spec)


_ITSELF = (
    "register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ __hash__ "
    "__set__.requires_grad __get__.grad __get__._base"
)
_ALIKE = "int long short bool byte cpu cuda detach alias __get__.data __deepcopy__"
_RANDOM = "rand_like randn_like randint_like bernoulli"

SequenceShard.rules = {
    **METADATA,
    **dict.fromkeys(_ITSELF.split(), on_itself),
    **dict.fromkeys(_ALIKE.split(), alike),
    **ELEMENTWISE,
    **dict.fromkeys(_RANDOM.split(), drawn),
    **VIEWS,
    **PRODUCTS,
    **LOSSES,
    "scaled_dot_product_attention": _attention,
}


def sequence_context(
    group: Group, say: Callable[[str], None] = lambda sentence: None
) -> SequenceContext:
    """The ranks of a group as those that share sequences."""
    return SequenceContext(group, say)
