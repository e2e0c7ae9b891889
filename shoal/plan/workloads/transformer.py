"""Transformers from their sizes alone: GPT, Llama and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from shoal.plan.workloads.transformer_block import TransformerSizes, block_cost
from shoal.plan.workloads.workload import (
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

MIXED = Precision("fp16", 2, 2, 4, 8)


@dataclass(frozen=True)
class Transformer:
    """A `Workload` of one embedding, equal blocks and a head; a sample is one sequence."""

    name: str
    sizes: TransformerSizes
    precision: Precision = MIXED

    accumulate = 1

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        blocks = LayerRun("block", self.sizes.layers)
        return (LayerRun("embedding", 1), blocks, LayerRun("head", 1))

    @property
    def limits(self) -> SplitLimits:
        sizes = self.sizes
        heads = (sizes.heads, sizes.key_heads)
        return SplitLimits(
            tp=heads,
            cp=sizes.sequence,
            ep=sizes.experts,
            stages=sizes.layers,
            sequence_parallel=True,
            selective_recompute=True,
        )

    def cost(self, run: int, split: Split) -> LayerCost:
        width = self.precision.parameter_bytes
        return (_embedding, block_cost, _head)[run](self.sizes, width, split)

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
def _embedding(sizes: TransformerSizes, width: int, split: Split) -> LayerCost:
    tokens = split.microbatch * sizes.sequence / split.cp
    out = width * tokens * sizes.hidden
    positions = sizes.sequence * sizes.hidden if sizes.learned_positions else 0
    messages = (LayerMessage("all_reduce", "tp", out),) if split.tp > 1 else ()
    rows = out / (split.tp if split.sequence_parallel else 1)
    return LayerCost(
        forward=(moving("embedding", 3 * out),),
        backward_input=(),
        backward_weight=(moving("embedding backward", 3 * out),),
        recompute=(),
        forward_messages=messages,
        backward_messages=(),
        parameters=sizes.vocab * sizes.hidden / split.tp + positions,
        activation_bytes=(rows / width if sizes.dropout else 0.0) + 8 * tokens,
        output_bytes=rows,
        largest_tensor=sizes.vocab * sizes.hidden / split.tp,
    )


@lru_cache(maxsize=100_000)
def _head(sizes: TransformerSizes, width: int, split: Split) -> LayerCost:
    """The last norm, logits and cross-entropy; logits are kept in fp32."""
    tokens = split.microbatch * sizes.sequence / split.cp
    columns = sizes.vocab / split.tp
    logits = product("logits", tokens, columns, sizes.hidden, width)
    to_input, to_weight = gradients_of(logits, width)
    table = tokens * columns
    hidden_bytes = width * tokens * sizes.hidden
    messages = (LayerMessage("all_reduce", "tp", 4 * tokens),) * 3 if split.tp > 1 else ()
    back = (LayerMessage("all_reduce", "tp", hidden_bytes),) if split.tp > 1 else ()
    own = 0.0 if sizes.tied else sizes.vocab * sizes.hidden / split.tp
    return LayerCost(
        forward=(moving("norm", 2 * hidden_bytes), logits, moving("softmax", (width + 8) * table)),
        backward_input=(to_input, moving("softmax backward", (width + 4) * table)),
        backward_weight=(to_weight,),
        recompute=(),
        forward_messages=messages,
        backward_messages=back,
        parameters=own + 2 * sizes.hidden,
        activation_bytes=2 * hidden_bytes + 4 * table,
        output_bytes=0.0,
        shared_parameters=sizes.vocab * sizes.hidden / split.tp if sizes.tied else 0.0,
        largest_tensor=own,
    )
