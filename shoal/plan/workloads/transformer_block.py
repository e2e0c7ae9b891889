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

from functools import lru_cache

from shoal.plan.workloads.attention_cost import (
    attention_gradients,
    attention_kernels,
    in_rounds,
    is_blockwise,
    ring_messages,
    sums_of_rounds,
)
from shoal.plan.workloads.kernels import gradients_of, moving, product
from shoal.plan.workloads.transformer_sizes import TransformerSizes
from shoal.plan.workloads.workload import Kernel, LayerCost, LayerMessage, Split


@lru_cache(maxsize=100_000)
def block_cost(sizes: TransformerSizes, width: int, split: Split) -> LayerCost:
    """`width`: bytes of a number."""
    tokens = split.microbatch * sizes.sequence / split.cp
    rows = tokens * (1 / split.tp if split.sequence_parallel else 1)  # of norms and dropouts
    hidden_bytes = width * rows * sizes.hidden
    attention = attention_kernels(sizes, split, width)
    linear = _linear_products(sizes, split, width)
    pointwise = _pointwise(sizes, split, width, hidden_bytes)
    backward = [gradients_of(kernel, width) for kernel in linear]
    core = attention_gradients(attention, split, width)
    moved = tuple(moving(f"{k.name} backward", 1.5 * k.bytes) for k in attention if not k.flops)
    attention = in_rounds(split, attention)
    core = in_rounds(split, core)
    sums = sums_of_rounds(sizes, split)
    ring_there, ring_back = ring_messages(sizes, split, width, (attention, (*core, *moved)))
    forward = (*linear, *attention, *sums, *pointwise)
    backward_moves = tuple(moving(f"{k.name} backward", 1.5 * k.bytes) for k in pointwise)
    message = _tp_messages(split, width * tokens * sizes.hidden)
    selective = () if is_blockwise(split) else attention
    again = {"none": (), "selective": selective, "full": forward}[split.recompute]
    return LayerCost(
        forward=forward,
        backward_input=(
            *(one for one, _ in backward),
            *core,
            *sums,
            *backward_moves,
            *moved,
        ),
        backward_weight=tuple(other for _, other in backward),
        recompute=again,
        forward_messages=message
        + ring_there
        + _ep_messages(sizes, split, width * tokens * sizes.hidden),
        backward_messages=message
        + ring_back
        + _gathered_again(split, width * tokens * sizes.hidden)
        + _ep_messages(sizes, split, width * tokens * sizes.hidden),
        parameters=_block_parameters(sizes, split),
        activation_bytes=_kept(sizes, split, width),
        output_bytes=width * tokens * sizes.hidden / (split.tp if split.sequence_parallel else 1),
        expert_parameters=_expert_parameters(sizes, split),
        largest_tensor=sizes.hidden * max(sizes.inner, sizes.qkv) / split.tp,
    )


def _linear_products(sizes: TransformerSizes, split: Split, width: int) -> tuple[Kernel, ...]:
    tokens = split.microbatch * sizes.sequence / split.cp
    hidden = sizes.hidden
    inner = sizes.inner / split.tp
    kv = max(sizes.key_heads / split.tp, 1.0) * sizes.head_size
    expert_tokens = tokens * sizes.top_k
    copies = sizes.experts / split.ep  # products of a worker's experts, each with its tokens
    per_expert = expert_tokens / copies if sizes.experts > 1 else tokens
    times = copies if sizes.experts > 1 else 1
    up = 2 if sizes.gated else 1
    return (
        product("qkv", tokens, hidden / split.tp + 2 * kv, hidden, width),
        product("projection", tokens, hidden, hidden / split.tp, width),
        product("up", per_expert, up * inner, hidden, width, times),
        product("down", per_expert, hidden, inner, width, times),
    )


def _pointwise(
    sizes: TransformerSizes, split: Split, width: int, hidden_bytes: float
) -> tuple[Kernel, ...]:
    tokens = split.microbatch * sizes.sequence / split.cp * sizes.top_k
    inner_bytes = width * tokens * sizes.inner / split.tp
    mask = hidden_bytes / width if sizes.dropout else 0.0
    reads = 3 if sizes.gated else 2
    return (
        moving("norm", 2 * hidden_bytes),
        moving("dropout and add", 3 * hidden_bytes + mask),
        moving("norm", 2 * hidden_bytes),
        moving("activation", reads * inner_bytes),
        moving("dropout and add", 3 * hidden_bytes + mask),
    )


def _tp_messages(split: Split, num_bytes: float) -> tuple[LayerMessage, ...]:
    """Two a direction; under sequence parallelism an all-gather and a reduce-scatter each."""
    if split.tp == 1:
        return ()
    if split.sequence_parallel:
        pair = (
            LayerMessage("all_gather", "tp", num_bytes),
            LayerMessage("reduce_scatter", "tp", num_bytes),
        )
        return pair + pair
    return (LayerMessage("all_reduce", "tp", num_bytes),) * 2


def _gathered_again(split: Split, num_bytes: float) -> tuple[LayerMessage, ...]:
    """Inputs of QKV and of the MLP are kept in parts; their weights' gradients need the whole."""
    if split.tp == 1 or not split.sequence_parallel:
        return ()
    return (LayerMessage("all_gather", "tp", num_bytes),) * 2


def _ep_messages(
    sizes: TransformerSizes, split: Split, num_bytes: float
) -> tuple[LayerMessage, ...]:
    if split.ep == 1 or sizes.experts == 1:
        return ()
    return (LayerMessage("all_to_all", "ep", num_bytes * sizes.top_k),) * 2


def _block_parameters(sizes: TransformerSizes, split: Split) -> float:
    up = 2 if sizes.gated else 1
    kv = max(sizes.key_heads / split.tp, 1.0) * sizes.head_size
    attention = sizes.hidden * (sizes.hidden / split.tp + 2 * kv) + sizes.hidden**2 / split.tp
    experts = (up + 1) * sizes.hidden * sizes.inner / split.tp * sizes.experts / split.ep
    router = sizes.hidden * sizes.experts if sizes.experts > 1 else 0
    biases = 0.0 if sizes.gated else (3 * sizes.hidden + sizes.inner) / split.tp + 2 * sizes.hidden
    norms = (2 if sizes.gated else 4) * sizes.hidden
    return attention + experts + router + biases + norms


def _expert_parameters(sizes: TransformerSizes, split: Split) -> float:
    if sizes.experts == 1:
        return 0.0
    up = 2 if sizes.gated else 1
    return (up + 1) * sizes.hidden * sizes.inner / split.tp * sizes.experts / split.ep


def _kept(sizes: TransformerSizes, split: Split, width: int) -> float:
    """Bytes between forward and backward; `width` 2 gives sbh(10 + 24/t + 5as/(ht))."""
    tokens = split.microbatch * sizes.sequence / split.cp
    rows = tokens / (split.tp if split.sequence_parallel else 1)
    block_input = width * rows * sizes.hidden
    if split.recompute == "full":
        return block_input
    masks = 2 * rows * sizes.hidden if sizes.dropout else 0.0
    per_row = 4 * block_input + masks  # two norms, and the inputs of QKV and of the MLP
    kv = max(sizes.key_heads / split.tp, 1.0) * sizes.head_size
    heads = width * tokens * (2 * sizes.hidden / split.tp + 2 * kv)  # Q, K, V, projection's input
    inner = (3 if sizes.gated else 2) * width * tokens * sizes.top_k * sizes.inner / split.tp
    kept = per_row + heads + inner
    if split.recompute == "none" and not is_blockwise(split):
        scores = split.microbatch * sizes.heads / split.tp * sizes.sequence**2 / split.cp
        kept += scores * (2 * width + 1 if sizes.dropout else width)
    return kept
