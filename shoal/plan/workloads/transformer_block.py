"""What one block of a transformer costs: kernels, messages, parameters, activations.

One block, with b samples of s tokens, hidden size h, a heads, f inner size, split over t ranks:

    norm    QKV: [bs, h] x [h, (h + 2 h_kv)/t]    scores: a/t x [s, d] x [d, s]    softmax, dropout
    values: a/t x [s, s] x [s, d]    projection: [bs, h/t] x [h/t, h]    all-reduce    dropout, add
    norm    up: [bs, h] x [h, f/t] (twice if gated)    activation    down: [bs, f/t] x [f/t, h]
    all-reduce    dropout, add

What backward needs is counted as in Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022): the input of every product, norm and activation, and masks of dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shoal.errors import BadInput
from shoal.plan.workloads import (
    GROUPED,
    Kernel,
    LayerCost,
    LayerMessage,
    LayerRun,
    Precision,
    Split,
    SplitLimits,
    StageTensors,
    gradients_of,
    moving,
    product,
)
from shoal.plan.workloads.pytorch_kernels import BlockNumbers, Width, casts, loss_cost, pointwise


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes of a decoder; `kv_heads` below `heads` is grouped-query attention.

    With `kv_rank` attention is latent (DeepSeek-V2 and V3): queries and keys come from vectors of
    `q_rank` and `kv_rank` numbers a token, and have `rope` rotated numbers more than values. The
    first `dense_layers` have one MLP of `dense_ffn` in place of experts.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 51200
    sequence: int = 2048
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    experts: int = 1
    top_k: int = 1
    shared_experts: int = 0  # that every token has, as dense layers
    dropout: bool = True
    tied: bool = True
    learned_positions: bool = True
    causal: bool = True
    head: int | None = None  # numbers of a head; None: hidden / heads
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    parallel: bool = False  # attention and MLP have one input, and their outputs one sum
    token_groups: int = 0  # of experts: a token goes once to each of at most so many; 0: no limit

    def __post_init__(self) -> None:
        uneven = self.head is None and self.hidden % self.heads
        if uneven or self.heads % self.key_heads:
            raise BadInput(
                f"heads={self.heads} must divide hidden={self.hidden}, and kv_heads="
                f"{self.key_heads} must divide heads"
            )

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def attention(self) -> int:
        """Numbers of all heads, as many as `hidden` unless `head` says more."""
        return self.heads * self.head_size

    @property
    def qkv(self) -> int:
        """Columns of the matrix that makes queries, keys and values."""
        return self.attention + 2 * self.key_heads * self.head_size

    @property
    def dense(self) -> TransformerSizes:
        """A layer before those with experts."""
        ffn = self.dense_ffn or self.inner
        return replace(self, experts=1, top_k=1, shared_experts=0, ffn=ffn)


_FP32_BYTES = 4
_ROUTER_KERNELS = 8  # top-k, its softmax, counts of tokens, places, their exchange
_FLASH_BACKWARD = 2.5  # five products, where forward has two


def attention_kernels(sizes: TransformerSizes, split: Split, width: int) -> tuple[Kernel, ...]:
    heads = split.microbatch * sizes.heads / split.tp
    queries = sizes.sequence / split.cp
    scores = product("scores", queries, sizes.sequence, sizes.head_size + sizes.rope, width, heads)
    values = product("values", queries, sizes.head_size, sizes.sequence, width, heads)
    seen = _seen(sizes, split)
    if split.flash_attention:  # scores stay on the chip
        moved = width * heads * 2 * (queries + sizes.sequence) * sizes.head_size
        flops = (scores.flops + values.flops) * seen
        dims = scores._replace(name="attention", flops=flops, bytes=moved)
        return (dims,)
    scores = scores._replace(flops=seen * scores.flops, bytes=seen * scores.bytes)
    values = values._replace(flops=seen * values.flops, bytes=seen * values.bytes)
    table = seen * width * heads * queries * sizes.sequence
    softmax = moving("mask and softmax", 2 * table)
    drop = (moving("attention dropout", 2 * table + table / width),) if sizes.dropout else ()
    return (scores, softmax, *drop, values)


def attention_gradients(
    attention: tuple[Kernel, ...], split: Split, width: int
) -> tuple[Kernel, ...]:
    """Two products for each one; what works in blocks also computes the scores again."""
    if split.flash_attention:
        (one,) = attention
        return (
            one._replace(
                name="attention backward", flops=_FLASH_BACKWARD * one.flops, bytes=2 * one.bytes
            ),
        )
    products = [kernel for kernel in attention if kernel.flops]
    pairs = [gradients_of(kernel, width) for kernel in products]
    gradients = tuple(
        gradient._replace(flops=kernel.flops, bytes=kernel.bytes)
        for kernel, pair in zip(products, pairs, strict=True)
        for gradient in pair
    )
    return (*gradients, *attention[:2]) if split.cp > 1 else gradients


def _seen(sizes: TransformerSizes, split: Split) -> float:
    """The share of all scores that causal attention computes.

    Flash kernels skip what is masked. Ring attention skips chunks: of 2p chunks a rank has one
    from each end, and of its 4p pairs of chunks it computes 2p + 1.
    """
    if not sizes.causal:
        return 1.0
    if split.flash_attention:
        return 0.5
    return 1.0 if split.cp == 1 else (2 * split.cp + 1) / (4 * split.cp)


def is_blockwise(split: Split) -> bool:
    """Whether attention keeps no scores: flash kernels, and the ring of cp."""
    return split.flash_attention or split.cp > 1


def in_rounds(split: Split, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Ring attention computes block by block, as the blocks arrive."""
    rounds = split.cp
    parts = [one._replace(flops=one.flops / rounds, bytes=one.bytes / rounds) for one in kernels]
    return tuple(parts) * rounds


@lru_cache(maxsize=100_000)
def block_cost(sizes: TransformerSizes, width: int, split: Split, stored: int = 0) -> LayerCost:
    """`width`: bytes of a number in products; `stored`: of weights and between blocks."""
    bytes_of = Width(width, stored or width)
    if split.recompute != "none":
        whole = block_cost(sizes, width, split._replace(recompute="none"), stored)
        again = tuple(one for one in whole.forward if is_recomputed(one.name, split))
        return replace(whole, recompute=again, activation_bytes=_kept(sizes, split, bytes_of))
    tokens = split.microbatch * sizes.sequence / split.cp
    rows = tokens * (1 / split.tp if split.sequence_parallel else 1)  # of norms and dropouts
    hidden_bytes = width * rows * sizes.hidden
    attention = attention_kernels(sizes, split, width)
    linear = _linear_products(sizes, split, width)
    if split.program.kernels == "fused":
        beside = _pointwise(sizes, split, width, hidden_bytes)
        beside_back = tuple(moving(f"{k.name} backward", 1.5 * k.bytes) for k in beside)
    else:
        block = _block_numbers(sizes, split)
        beside, beside_back = pointwise(block, bytes_of, split.program.kernels == "compiled")
    backward = [gradients_of(kernel, width) for kernel in linear]
    core = attention_gradients(attention, split, width)
    moved = tuple(moving(f"{k.name} backward", 1.5 * k.bytes) for k in attention if not k.flops)
    attention = in_rounds(split, attention)
    core = in_rounds(split, core)
    # each round's result is added to those before, in fp32
    numbers = tokens * sizes.heads / split.tp * sizes.head_size
    sums = (moving("sum of rounds", 3 * _FP32_BYTES * numbers),) * (split.cp - 1)
    ring_there: tuple[LayerMessage, ...] = ()
    ring_back: tuple[LayerMessage, ...] = ()
    if split.cp > 1:  # K and V go round, in backward again with their gradients in fp32
        kv = 2 * split.microbatch * sizes.sequence * _kv(sizes, split)
        ring_there = (LayerMessage("ring_attention", "cp", width * kv, attention),)
        ring_back = (LayerMessage("ring_attention", "cp", (width + 4) * kv, (*core, *moved)),)
    forward = (*linear, *attention, *sums, *beside)
    sent = width * tokens * sizes.hidden
    is_folded = split.fold_ep and sizes.experts > 1
    results = 1 if sizes.parallel or is_folded else 2  # of attention and of the MLP
    message = _tp_messages(split, sent) * results
    # inputs of QKV and of the MLP are kept in parts; their weights' gradients need the whole
    gathered_again = message[:1] * results if split.sequence_parallel else ()
    experts: tuple[LayerMessage, ...] = ()
    if split.ep > 1 and sizes.experts > 1:
        copies = min(sizes.top_k, sizes.token_groups or sizes.top_k)
        tokens_sent = sent / split.tp if is_folded else sent
        experts = (LayerMessage("all_to_all", "ep", tokens_sent * copies),) * 2
    return LayerCost(
        forward=forward,
        backward_input=(*(one for one, _ in backward), *core, *sums, *beside_back, *moved),
        backward_weight=tuple(other for _, other in backward),
        forward_messages=(*message, *ring_there, *experts),
        backward_messages=(*message, *ring_back, *gathered_again, *experts),
        parameters=_block_parameters(sizes, split),
        activation_bytes=_kept(sizes, split, bytes_of),
        tensors=0 if sizes.experts > 1 else len(linear) * (1 if sizes.gated else 2) + 4,
        output_bytes=sent / (split.tp if split.sequence_parallel else 1),
        expert_parameters=_mlp_parameters(sizes, split) if sizes.experts > 1 else 0.0,
        largest_tensor=sizes.hidden * max(sizes.inner, sizes.qkv) / split.tp,
    )


def _experts_of_a_token(sizes: TransformerSizes) -> int:
    return sizes.top_k + sizes.shared_experts


def _kv(sizes: TransformerSizes, split: Split) -> float:
    """Numbers of a token's keys on one rank; a head is on several ranks where there are few."""
    return max(sizes.key_heads / split.tp, 1.0) * sizes.head_size


def _projections(sizes: TransformerSizes, split: Split) -> list[tuple[str, float, float]]:
    """The products of attention: name, columns and rows of the matrix that a rank holds."""
    hidden = sizes.hidden
    attention = sizes.attention / split.tp
    projection = ("projection", float(hidden), attention)
    if not sizes.kv_rank:
        return [("qkv", attention + 2 * _kv(sizes, split), hidden), projection]
    queries = attention + sizes.heads * sizes.rope / split.tp
    from_latent = [("queries", queries, sizes.q_rank or hidden)]
    to_latent = [("latent queries", float(sizes.q_rank), hidden)] if sizes.q_rank else []
    return [
        *to_latent,
        *from_latent,
        ("latent keys", float(sizes.kv_rank + sizes.rope), hidden),
        ("keys and values", 2 * attention, sizes.kv_rank),
        projection,
    ]


def _linear_products(sizes: TransformerSizes, split: Split, width: int) -> tuple[Kernel, ...]:
    tokens = split.microbatch * sizes.sequence / split.cp
    hidden = sizes.hidden
    inner = sizes.inner / split.tp
    expert_tokens = tokens * sizes.top_k
    copies = sizes.experts / split.ep  # products of a worker's experts, each with its tokens
    per_expert = expert_tokens / copies if sizes.experts > 1 else tokens
    times = copies if sizes.experts > 1 else 1
    if split.fold_ep and sizes.experts > 1:
        times = copies / split.tp
        inner = float(sizes.inner)
    up = 2 if sizes.gated else 1
    which = GROUPED if sizes.experts > 1 else ""
    found = [
        *(
            product(name, tokens, out, given, width)
            for name, out, given in _projections(sizes, split)
        ),
        product(f"{which}up", per_expert, up * inner, hidden, width, times),
        product(f"{which}down", per_expert, hidden, inner, width, times),
    ]
    if shared := sizes.shared_experts * inner:
        found.append(product("shared up", tokens, up * shared, hidden, width))
        found.append(product("shared down", tokens, hidden, shared, width))
    return tuple(found)


def _pointwise(
    sizes: TransformerSizes, split: Split, width: int, hidden_bytes: float
) -> tuple[Kernel, ...]:
    tokens = split.microbatch * sizes.sequence / split.cp
    inner_bytes = width * tokens * _experts_of_a_token(sizes) * sizes.inner / split.tp
    mask = hidden_bytes / width if sizes.dropout else 0.0
    reads = 3 if sizes.gated else 2
    turned = width * tokens * (sizes.attention / split.tp + _kv(sizes, split))  # queries and keys
    rotary = () if sizes.learned_positions else (moving("rotary", 2 * turned),)
    routed: tuple[Kernel, ...] = ()
    if sizes.experts > 1:  # which, to their places and back; kernels of counts and places are small
        copies = sizes.top_k * hidden_bytes
        turned_over = (moving("permute", 2 * copies), moving("combine", 2 * copies))
        small = (moving("places", hidden_bytes / sizes.hidden),) * _ROUTER_KERNELS
        routed = (moving("router", hidden_bytes), *turned_over, *small)
    return (
        *routed,
        *rotary,
        *(moving("norm", 2 * hidden_bytes),) * (1 if sizes.parallel else 2),
        moving("dropout and add", 3 * hidden_bytes + mask),
        moving("activation", reads * inner_bytes),
        moving("dropout and add", 3 * hidden_bytes + mask),
    )


def _tp_messages(split: Split, num_bytes: float) -> tuple[LayerMessage, ...]:
    """One sum; under sequence parallelism an all-gather and a reduce-scatter."""
    if split.tp == 1:
        return ()
    kinds = ("all_gather", "reduce_scatter") if split.sequence_parallel else ("all_reduce",)
    return tuple(LayerMessage(kind, "tp", num_bytes) for kind in kinds)


def _block_parameters(sizes: TransformerSizes, split: Split) -> float:
    attention = sum(out * given for _, out, given in _projections(sizes, split))
    experts = _mlp_parameters(sizes, split)
    experts += sizes.shared_experts * experts * split.ep / sizes.experts
    router = sizes.hidden * sizes.experts if sizes.experts > 1 else 0
    biases = 0.0 if sizes.gated else (3 * sizes.hidden + sizes.inner) / split.tp + 2 * sizes.hidden
    norms = (2 if sizes.gated else 4) * sizes.hidden / (2 if sizes.parallel else 1)
    return attention + experts + router + biases + norms


def _mlp_parameters(sizes: TransformerSizes, split: Split) -> float:
    """Of all experts of a worker."""
    up = 2 if sizes.gated else 1
    return (up + 1) * sizes.hidden * sizes.inner / split.tp * sizes.experts / split.ep


_AGAIN = {  # operations by the names of their kernels
    "norm": ("norm", "native_layer_norm", "fused norm", "to_copy"),
    "qkv": ("qkv", "queries", "latent keys", "keys and values"),
    "attention": ("attention", "scores", "mask and softmax", "attention dropout", "values"),
    "up": ("up", "shared up"),
    "activation": ("activation", "gelu", "silu", "mul", "fused gelu"),
}


def recomputed(split: Split) -> frozenset[str]:
    """Operations whose results are not kept; "selective" are those between Q, K, V and values."""
    if split.recompute == "selective":
        return frozenset() if is_blockwise(split) else frozenset(("scores",))
    return frozenset(split.recompute.split(","))


def is_recomputed(name: str, split: Split) -> bool:
    """Whether a kernel of forward runs again in backward."""
    chosen = recomputed(split)
    if "scores" in chosen:
        return name in _AGAIN["attention"]
    return "full" in chosen or any(name in _AGAIN.get(one, ()) for one in chosen)


def _kept(sizes: TransformerSizes, split: Split, width: Width) -> float:
    """Bytes between forward and backward; 2 of each number give sbh(10 + 24/t + 5as/(ht))."""
    tokens = split.microbatch * sizes.sequence / split.cp
    rows = tokens / (split.tp if split.sequence_parallel else 1)
    hidden = rows * sizes.hidden
    chosen = recomputed(split)
    if "full" in chosen:
        return width.stored * hidden
    heads = width.compute * tokens * sizes.attention / split.tp
    latent = sizes.q_rank + sizes.kv_rank + sizes.rope * (2 * sizes.heads / split.tp + 1)
    inner = width.compute * tokens * sizes.inner / split.tp * _experts_of_a_token(sizes)
    of_scores = 0.0
    if not is_blockwise(split) and not chosen & {"scores", "attention"}:
        of_scores = split.microbatch * sizes.heads / split.tp * sizes.sequence**2 / split.cp
    norms = 1 if sizes.parallel else 2
    results = {  # by the operation that makes them; two norms, inputs of products, Q, K and V
        "add": norms * width.stored * hidden,
        "norm": norms * width.compute * hidden,
        "mask": 2 * hidden if sizes.dropout else 0.0,
        "qkv": heads + width.compute * tokens * (2 * _kv(sizes, split) + latent),
        "attention": heads,
        "up": (2 if sizes.gated else 1) * inner,
        "activation": inner,
        "scores": of_scores * (2 * width.compute + 1 if sizes.dropout else width.compute),
    }
    kept = sum(size for name, size in results.items() if name not in chosen)
    if width.is_cast and split.program.kernels != "fused":
        kept += width.compute * _block_parameters(sizes, split)  # copies of weights
    return kept


def _block_numbers(sizes: TransformerSizes, split: Split) -> BlockNumbers:
    tokens = split.microbatch * sizes.sequence / split.cp
    rows = tokens / (split.tp if split.sequence_parallel else 1)
    heads = sizes.attention / split.tp
    kv = _kv(sizes, split)
    matrices = [out * given for _, out, given in _projections(sizes, split)]
    mlp = _mlp_parameters(sizes, split)
    biases = (sizes.qkv / split.tp, sizes.hidden, sizes.inner / split.tp, sizes.hidden)
    return BlockNumbers(
        hidden=rows * sizes.hidden,
        inner=tokens * _experts_of_a_token(sizes) * sizes.inner / split.tp,
        qkv=tokens * (heads + 2 * kv),
        turned=0.0 if sizes.learned_positions else tokens * (heads + kv),
        weights=(*matrices, mlp / 2, mlp / 2, *(() if sizes.gated else biases)),
        norms=1 if sizes.parallel else 2,
        gated=sizes.gated,
        dropout=sizes.dropout,
    )


MIXED = Precision("fp16", 2, 2, 4, 8)


@dataclass(frozen=True)
class Transformer:
    """A `Workload` of one embedding, equal blocks and a head; a sample is one sequence."""

    name: str
    sizes: TransformerSizes
    precision: Precision = MIXED

    accumulate = 1
    row_tables = ()

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        dense = self.sizes.dense_layers
        first = (LayerRun("dense block", dense),) if dense else ()
        blocks = LayerRun("block", self.sizes.layers - dense)
        return (LayerRun("embedding", 1), *first, blocks, LayerRun("head", 1))

    @property
    def limits(self) -> SplitLimits:
        sizes = self.sizes
        return SplitLimits(
            tp=(sizes.heads, sizes.key_heads),
            cp=sizes.sequence,
            ep=sizes.experts,
            stages=sizes.layers,
            sequence_parallel=True,
            selective_recompute=True,
        )

    def cost(self, run: int, split: Split) -> LayerCost:
        held = self.precision
        name = self.runs[run].name
        sizes = self.sizes.dense if name == "dense block" else self.sizes
        return _COSTS[name](sizes, held.width, split, held.parameter_bytes)

    def tensors(self, layers: tuple[int, ...], split: Split) -> StageTensors | None:
        """None: sizes say how many numbers there are, not how a program lays them out."""
        return None

    def model_flops(self, samples: int, flash_attention: bool = False) -> float:
        """Backward has two products for each of forward."""
        one = Split(flash_attention=flash_attention)
        total = 0.0
        for index, run in enumerate(self.runs):
            forward = sum(kernel.flops for kernel in self.cost(index, one).forward)
            total += run.count * 3 * forward
        return total * samples


@lru_cache(maxsize=100_000)
def _embedding(sizes: TransformerSizes, width: int, split: Split, stored: int = 0) -> LayerCost:
    tokens = split.microbatch * sizes.sequence / split.cp
    out = width * tokens * sizes.hidden
    positions = sizes.sequence * sizes.hidden if sizes.learned_positions else 0
    messages = (LayerMessage("all_reduce", "tp", out),) if split.tp > 1 else ()
    rows = out / (split.tp if split.sequence_parallel else 1)
    there: tuple[Kernel, ...] = (moving("embedding", 3 * out),)
    back: tuple[Kernel, ...] = (moving("embedding backward", 3 * out),)
    if split.program.kernels != "fused":
        numbers = tokens * sizes.hidden
        table = sizes.vocab * sizes.hidden / split.tp
        there = (moving("embedding", 2 * stored * numbers),)
        back = (moving("embedding_dense_backward", stored * (numbers + table)),)
        if sizes.learned_positions:
            there += (moving("add", 2 * stored * numbers),)
            back += (moving("sum", stored * numbers),)
    return LayerCost(
        forward=there,
        backward_input=(),
        backward_weight=back,
        forward_messages=messages,
        parameters=sizes.vocab * sizes.hidden / split.tp + positions,
        activation_bytes=(rows / width if sizes.dropout else 0.0) + 8 * tokens,
        output_bytes=rows,
        largest_tensor=sizes.vocab * sizes.hidden / split.tp,
    )


@lru_cache(maxsize=100_000)
def _head(sizes: TransformerSizes, width: int, split: Split, stored: int = 0) -> LayerCost:
    """The last norm, logits and cross-entropy; fused programs keep logits in fp32."""
    tokens = split.microbatch * sizes.sequence / split.cp
    columns = sizes.vocab / split.tp
    hidden_bytes = width * tokens * sizes.hidden
    messages = (LayerMessage("all_reduce", "tp", 4 * tokens),) * 3 if split.tp > 1 else ()
    back = (LayerMessage("all_reduce", "tp", hidden_bytes),) if split.tp > 1 else ()
    own = 0.0 if sizes.tied else sizes.vocab * sizes.hidden / split.tp
    layer = _fused_head if split.program.kernels == "fused" else _pytorch_head
    return replace(
        layer(sizes, Width(width, stored or width), split, columns),
        forward_messages=messages,
        backward_messages=back,
        parameters=own + 2 * sizes.hidden,
        shared_parameters=sizes.vocab * sizes.hidden / split.tp if sizes.tied else 0.0,
        largest_tensor=own,
    )


def _fused_head(sizes: TransformerSizes, width: Width, split: Split, columns: float) -> LayerCost:
    tokens = split.microbatch * sizes.sequence / split.cp
    w = width.compute
    logits = product("logits", tokens, columns, sizes.hidden, w)
    to_input, to_weight = gradients_of(logits, w)
    table = tokens * columns
    hidden_bytes = w * tokens * sizes.hidden
    softmax = moving("softmax", (w + 8) * table)
    return LayerCost(
        forward=(moving("norm", 2 * hidden_bytes), logits, softmax),
        backward_input=(to_input, moving("softmax backward", (w + 4) * table)),
        backward_weight=(to_weight,),
        parameters=0.0,
        activation_bytes=2 * hidden_bytes + 4 * table,
        output_bytes=0.0,
    )


def _pytorch_head(sizes: TransformerSizes, width: Width, split: Split, columns: float) -> LayerCost:
    """torch.compile pads the columns of logits to a multiple of 8."""
    tokens = split.microbatch * sizes.sequence / split.cp
    w = width.compute
    is_compiled = split.program.kernels == "compiled"
    padded = 8 * math.ceil(columns / 8) if is_compiled else columns
    logits = product("logits", tokens, padded, sizes.hidden, w)
    to_input, to_weight = gradients_of(logits, w)
    hidden = tokens * sizes.hidden
    weights = columns * sizes.hidden
    loss = loss_cost(tokens * columns, width, split.program)
    norm = "native_layer_norm"
    back = "native_layer_norm_backward"
    if is_compiled:
        norm = "fused norm"
        back = "fused norm backward"
    again = (logits,) if split.program.loss == "chunked" else ()
    return LayerCost(
        forward=(
            *(moving(norm, 2 * width.stored * hidden), *casts((hidden, weights), width)),
            *(logits, *loss.forward),
        ),
        backward_input=(
            *(*again, to_input, *loss.backward),
            moving(back, 3 * width.stored * hidden),
            *casts((hidden,), width, "to_copy mixed"),
        ),
        backward_weight=(
            *(to_weight, *casts((weights,), width, "to_copy mixed")),
            *((moving("add", 3 * width.stored * weights),) if sizes.tied else ()),
        ),
        parameters=0.0,
        activation_bytes=(width.stored + w) * hidden + loss.kept + (w * weights) * width.is_cast,
        output_bytes=0.0,
        passing_bytes=loss.passing,
    )


_COSTS = {"embedding": _embedding, "dense block": block_cost, "block": block_cost, "head": _head}
