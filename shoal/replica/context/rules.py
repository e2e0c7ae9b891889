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
from shoal.replica.context.ring import AttentionPlan, ring_attention
from shoal.replica.context.sequence_shard import (
    SequenceContext,
    SequenceShard,
    SequenceSpec,
    of_sequence,
)
from shoal.replica.context.views import VIEWS, Along
from shoal.replica.microbatch_context import as_autocast_does
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import (
    ELEMENTWISE,
    METADATA,
    ShardedCall,
    alike,
    drawn,
    full_tensors,
    on_itself,
)
from shoal.runtime.pytree import map_tensors, tensors_of

# ------------------------------------------------------------------ layers and matrix products


def _per_position(op: ShardedCall, x: SequenceShard, last_dims: int) -> Any:
    """A layer that looks at the last dimensions of each position; weights are not sharded."""
    others = [t for t in tensors_of((op.args, op.kwargs)) if t is not x]
    if x.spec.dim >= x.dim() - last_dims or any(isinstance(t, SequenceShard) for t in others):
        return NotImplemented
    args, kwargs = map_tensors(lambda t: t.local if t is x else t, (op.args, op.kwargs))
    return x.like(op.function(*args, **kwargs))


def _norm(op: ShardedCall, x: SequenceShard) -> Any:
    return _per_position(op, x, len(op.argument(1, "normalized_shape")))


def _embedding(op: ShardedCall, ids: SequenceShard) -> Any:
    """Rows of a table for the ids of each position; the table may be used in full elsewhere."""
    return _per_position(op, ids, 0) if op.argument(3, "max_norm") is None else NotImplemented


def _one_hot(op: ShardedCall, ids: SequenceShard) -> Any:
    return _per_position(op, ids, 0) if op.argument(1, "num_classes", -1) != -1 else NotImplemented


def _matmul(op: ShardedCall) -> Any:
    a = op.args[0]
    b = op.argument(1, "other", op.kwargs.get("mat2", op.kwargs.get("vec2")))
    if op.name == "__rmatmul__":
        a, b = b, a
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    if isinstance(a, SequenceShard) and a.spec.dim == a.dim() - 2:
        product = a.local @ full_tensors(b)
        return op.context.wrap(product, a.spec.at(product.dim() - 2))
    if isinstance(a, SequenceShard) and isinstance(b, SequenceShard):
        is_inner = a.spec.dim == a.dim() - 1 and b.spec.dim == b.dim() - 2
        if is_inner and a.spec.at(0) == b.spec.at(0):  # the product is a sum over positions
            return sum_over_ranks(a.local @ b.local, op.context.group)
    if isinstance(b, SequenceShard) and b.spec.dim == b.dim() - 1:
        product = full_tensors(a) @ b.local
        return op.context.wrap(product, b.spec.at(product.dim() - 1))
    # positions among the dimensions before the matrices, as in an elementwise operation
    leader = a if isinstance(a, SequenceShard) else b
    if leader.dim() - leader.spec.dim <= 2:
        return NotImplemented
    return leader.wrap_aligned(leader.align(a) @ leader.align(b))


def _addmm(op: ShardedCall) -> Any:
    """bias + x @ weight, with positions among the rows of x."""
    bias, x = op.args[:2]
    if not isinstance(x, SequenceShard) or x.spec.dim != 0 or bias.dim() != 1:
        return NotImplemented
    return _per_position(op, x, 1)


def _einsum(op: ShardedCall) -> Any:
    equation = op.args[0]
    operands = list(op.args[1]) if isinstance(op.args[1], (list, tuple)) else list(op.args[1:])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    leader = next(i for i, t in enumerate(operands) if isinstance(t, SequenceShard))
    spec = operands[leader].spec
    letter = terms[leader][spec.dim]
    if any(term.count(letter) > 1 for term in terms):
        return NotImplemented
    places = [spec.at(term.find(letter)) for term in terms]
    result = op.function(equation, *map(op.context.local_part, operands, places))
    if letter in output:
        return op.context.wrap(result, spec.at(output.index(letter)))
    return sum_over_ranks(result, op.context.group)


# ------------------------------------------------------------------ sums and losses

_LEGACY = {"size_average", "reduce"}
_COMMON = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"]
_CLASSIFIED = {"cross_entropy": [*_COMMON, "label_smoothing"], "nll_loss": _COMMON}
_POINTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div"
)


def _sum(op: ShardedCall, x: SequenceShard) -> Any:
    """`sum` and `mean`, over the positions of all ranks where the call is along them."""
    dim = op.argument(1, "dim", op.kwargs.get("axis"))
    dims = [dim] if isinstance(dim, int) else dim or range(x.dim())
    dims = [d % x.dim() for d in dims]
    if x.spec.dim not in dims:
        return Along(1)(op)
    if op.argument(3, "dtype") is not None:
        return NotImplemented
    # it may be larger than a half-precision number can be
    wide = x.local.float() if x.dtype in (torch.float16, torch.bfloat16) else x.local
    local = wide.sum(dims, keepdim=bool(op.argument(2, "keepdim", False)))
    total = sum_over_ranks(local, op.context.group)
    if op.name == "mean":
        total = total / math.prod(x.full_shape[d] for d in dims)
    return total.to(x.dtype) if x.is_floating_point() else total


def _classified(op: ShardedCall) -> Any:
    """`cross_entropy` and `nll_loss`: classes are dimension 1, or 0 of a single sample."""
    given = dict(zip(_CLASSIFIED[op.name], op.args, strict=False)) | op.kwargs
    logits = given["input"]
    reduction = given.get("reduction", "mean")
    is_odd = any(given.get(name) is not None for name in _LEGACY)
    if is_odd or not isinstance(logits, SequenceShard) or logits.dim() < 2 or logits.spec.dim == 1:
        return NotImplemented
    if isinstance(given.get("weight"), SequenceShard) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    spec = logits.spec
    if given["target"].dim() == logits.dim() - 1:  # classes, and no probability of each
        spec = spec.at(spec.dim - int(spec.dim > 1))
    wanted = op.context.local_part(given["target"], spec)
    names = ("weight", "ignore_index", "label_smoothing")
    options = {name: given[name] for name in names if given.get(name) is not None}
    function = F.cross_entropy if op.name == "cross_entropy" else F.nll_loss
    if reduction == "none":
        loss = function(logits.local, wanted, reduction="none", **options)
        return logits.wrap_along(loss, [1])
    here = function(logits.local, wanted, reduction="sum", **options)
    total = sum_over_ranks(here, op.context.group)
    return total / _count(op, wanted, options) if reduction == "mean" else total


def _count(op: ShardedCall, target: Tensor, options: dict[str, Any]) -> Tensor:
    """What a mean over tokens divides by, over all ranks: the weight of those that count."""
    counts = target != options.get("ignore_index", -100)
    weight = options.get("weight")
    if target.is_floating_point():
        number = torch.tensor(target.numel() / target.shape[1], device=target.device)
    elif weight is None:
        number = counts.sum().to(torch.float32)
    else:
        number = weight[target.where(counts, 0)].where(counts, 0).sum()
    total = number.detach().clone()
    op.context.group.all_reduce(total).wait()
    return total


def _pointwise(op: ShardedCall) -> Any:
    """Losses that compare elements: without a reduction they are elementwise."""
    names = ("input", "target")
    given = dict(zip(names, op.args, strict=False)) | op.kwargs
    reduction = given.pop("reduction", "mean")
    is_odd = len(op.args) > 2 or any(given.get(name) is not None for name in _LEGACY)
    shapes = [t.full_shape if isinstance(t, SequenceShard) else t.shape
              for t in (given[name] for name in names)]  # fmt: skip
    if is_odd or reduction not in ("none", "mean", "sum") or shapes[0] != shapes[1]:
        return NotImplemented
    loss = op.function(**map_tensors(op.leader.align, given), reduction="none")
    if reduction == "none":
        return op.leader.wrap_aligned(loss)
    total = sum_over_ranks(loss.sum(), op.context.group)
    return total if reduction == "sum" else total / shapes[0].numel()


# ------------------------------------------------------------------ attention

_PARAMETERS = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]


def _attention(op: ShardedCall) -> Any:
    given = dict(zip(_PARAMETERS, op.args, strict=False)) | op.kwargs
    q = given["query"]
    k = given["key"]
    v = given["value"]
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
    q, k, v = (as_autocast_does(given[name].local) for name in ("query", "key", "value"))
    if given.get("attn_mask") is not None and given.get("is_causal"):
        raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
    mask = _rows_of_mask(op, given.get("attn_mask"), spec)
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:  # several heads of queries share a head of keys
        heads = k.shape[-3]
        q = torch.unflatten(q, -3, (heads, groups))
        k = k.unsqueeze(-3)
        v = v.unsqueeze(-3)
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


def _rows_of_mask(op: ShardedCall, mask: Tensor | None, spec: SequenceSpec) -> Tensor | None:
    """The rows of a mask that belong to this rank's queries, with all keys."""
    context: SequenceContext = op.context
    return None if mask is None else context.local_part(mask, spec.at(mask.dim() - 2))


def _grouped(mask: Tensor | None, heads: int, groups: int) -> Tensor | None:
    if mask is None or mask.dim() < 3:
        return mask
    is_shared = mask.shape[-3] == 1
    return mask.unsqueeze(-3) if is_shared else torch.unflatten(mask, -3, (heads, groups))


def _with_all_keys(op: ShardedCall, given: dict[str, Any]) -> SequenceShard:
    """This rank's queries over keys that are gathered, or belong to another sequence."""
    context: SequenceContext = op.context
    q: SequenceShard = given["query"]
    k, v = full_tensors((given["key"], given["value"]))
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
    "linear": of_sequence(lambda op, x: _per_position(op, x, 1)),
    **dict.fromkeys(["layer_norm", "rms_norm"], of_sequence(_norm)),
    "embedding": of_sequence(_embedding),
    "one_hot": of_sequence(_one_hot),
    **dict.fromkeys(["matmul", "__matmul__", "__rmatmul__", "bmm", "mm"], _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
    **dict.fromkeys(["sum", "mean"], of_sequence(_sum)),
    **dict.fromkeys(_CLASSIFIED, _classified),
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
    "scaled_dot_product_attention": _attention,
}


def sequence_context(
    group: Group, say: Callable[[str], None] = lambda sentence: None
) -> SequenceContext:
    """The ranks of a group as those that share sequences."""
    return SequenceContext(group, say)
