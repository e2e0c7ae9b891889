"""What attention costs: plain, by flash kernels, or as a ring over the ranks of cp."""

from __future__ import annotations

from shoal.plan.workloads.kernels import gradients_of, moving, product
from shoal.plan.workloads.transformer_sizes import TransformerSizes
from shoal.plan.workloads.workload import Kernel, LayerMessage, Split

_FP32_BYTES = 4
_FLASH_BACKWARD = 2.5  # five products, where forward has two


def attention_kernels(sizes: TransformerSizes, split: Split, width: int) -> tuple[Kernel, ...]:
    heads = split.microbatch * sizes.heads / split.tp
    queries = sizes.sequence / split.cp
    scores = product("scores", queries, sizes.sequence, sizes.head_size, width, heads)
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


def sums_of_rounds(sizes: TransformerSizes, split: Split) -> tuple[Kernel, ...]:
    """Each round's result is added to those before, in fp32."""
    tokens = split.microbatch * sizes.sequence / split.cp
    numbers = tokens * sizes.heads / split.tp * sizes.head_size
    return (moving("sum of rounds", 3 * _FP32_BYTES * numbers),) * (split.cp - 1)


def ring_messages(
    sizes: TransformerSizes,
    split: Split,
    width: int,
    computed: tuple[tuple[Kernel, ...], tuple[Kernel, ...]],
) -> tuple[tuple[LayerMessage, ...], tuple[LayerMessage, ...]]:
    """Ring attention: K and V go round, in backward again with their gradients in fp32.

    While a block is on its way, the rank computes with it.
    """
    if split.cp == 1:
        return (), ()
    kv = max(sizes.key_heads / split.tp, 1.0) * sizes.head_size
    numbers = 2 * split.microbatch * sizes.sequence * kv
    there = LayerMessage("ring_attention", "cp", width * numbers, computed[0])
    back = LayerMessage("ring_attention", "cp", (width + 4) * numbers, computed[1])
    return (there,), (back,)
