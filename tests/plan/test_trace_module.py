"""Workloads that are traced from modules, against closed forms and torch's own counter."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from shoal.commands.examples.gpt import GPT, SIZES, VOCABULARY, next_token_loss
from shoal.observe.workload_trace import tp_roles
from shoal.plan.tracing.module import trace_module, workload_of
from shoal.plan.workloads import Kernel, LayerCost, Precision, Split
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes

SIZE = SIZES["small"]
BLOCK = 3  # which of the runs has the blocks: after tokens, positions and dropout


@cache
def gpt() -> TracedWorkload:
    model = GPT(SIZE)
    tokens = torch.zeros(8, SIZE.context, dtype=torch.long)
    return workload_of(model, tokens, _gpt_loss, tp_roles(model))


def _gpt_loss(logits: Tensor) -> Tensor:
    return next_token_loss(logits, torch.zeros(logits.shape[:2], dtype=torch.long))


def products(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.flops for kernel in kernels)


def costs(workload: TracedWorkload, split: Split) -> list[tuple[int, LayerCost]]:
    return [(run.count, workload.cost(i, split)) for i, run in enumerate(workload.runs)]


def test_gpt_has_the_flops_and_parameters_of_its_sizes_and_equal_blocks_are_one_run() -> None:
    sizes = TransformerSizes(SIZE.layers, SIZE.width, SIZE.heads, VOCABULARY, SIZE.context)
    closed_form = Transformer("gpt", sizes)
    assert gpt().model_flops(3) == pytest.approx(closed_form.model_flops(3), rel=0.02)
    assert gpt().parameters == sum(p.numel() for p in GPT(SIZE).parameters())
    names = [(run.name, run.count) for run in gpt().runs]
    assert (names[0], names[BLOCK], names[-1]) == (("tokens", 1), ("blocks.0-1", 2), ("head", 1))
    assert TracedWorkload.from_json(gpt().to_json()) == gpt()


def test_a_micro_batch_of_another_size_lies_on_the_line_of_both_traces() -> None:
    for _, cost in costs(gpt(), Split(microbatch=8)):
        assert all(kernel.flops >= 0 and kernel.bytes > 0 for kernel in cost.forward)
    at = [gpt().cost(BLOCK, Split(microbatch=rows)) for rows in (1, 2, 3)]
    assert products(at[2].forward) - products(at[1].forward) == products(at[0].forward)
    weights = [sum(kernel.bytes for kernel in cost.backward_weight) for cost in at]
    assert weights[2] - weights[1] == pytest.approx(weights[1] - weights[0])
    assert weights[1] < 2 * weights[0]  # gradients of weights are written once


def test_tp_divides_products_and_sends_what_row_layers_sum() -> None:
    whole = gpt().cost(BLOCK, Split(microbatch=4))
    half = gpt().cost(BLOCK, Split(microbatch=4, tp=2))
    for kind in ("forward", "backward_input", "backward_weight"):
        assert products(getattr(half, kind)) == products(getattr(whole, kind)) / 2
    assert not whole.forward_messages
    message = ("all_reduce", "tp", 4 * 4 * SIZE.context * SIZE.width)
    for messages in (half.forward_messages, half.backward_messages):
        assert [m[:3] for m in messages] == [message, message]
    assert whole.parameters / 2 < half.parameters < 0.52 * whole.parameters
    assert half.activation_bytes < whole.activation_bytes


def test_recompute_keeps_the_input_of_a_layer() -> None:
    cost = gpt().cost(BLOCK, Split(microbatch=4, recompute="full"))
    assert cost.recompute == cost.forward
    assert cost.activation_bytes == 4 * 4 * SIZE.context * SIZE.width


class Branches(nn.Sequential):
    """Convolutions with a shortcut, a norm and a transposed one."""

    def forward(self, x: Tensor) -> Tensor:
        first, norm, second, up, head = self
        x = norm(first(x)).relu_()
        y: Tensor = head(up(x + second(x)).mean((2, 3)))
        return y


class Recurrent(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        table, lstm, head = self
        y: Tensor = head(lstm(table(x))[0])
        return y


BRANCHES = Branches(
    nn.Conv2d(3, 8, 3, stride=2, padding=1),
    nn.BatchNorm2d(8),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.ConvTranspose2d(8, 4, 2, stride=2),
    nn.Linear(4, 10),
)
RECURRENT = Recurrent(nn.Embedding(50, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 50))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (BRANCHES, torch.zeros(4, 3, 16, 16)),
        pytest.param(RECURRENT, torch.zeros(4, 7, dtype=torch.long), marks=pytest.mark.whole),
        (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), torch.zeros(4, 8)),
        (nn.Linear(8, 2), torch.zeros(1, 8)),
        pytest.param(
            nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
            torch.zeros(4, 5, 32),
            marks=pytest.mark.whole,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_flops_are_those_that_torch_counts(model: nn.Module, inputs: Tensor) -> None:
    workload = workload_of(model, inputs)
    was_on = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # else a recurrent layer is not counted
    try:
        with FlopCounterMode(display=False) as counter:
            model(inputs).sum().backward()
    finally:
        torch._C._set_mkldnn_enabled(was_on)
    split = Split(microbatch=len(inputs))
    total = 0.0
    for count, cost in costs(workload, split):
        kernels = (*cost.forward, *cost.backward_input, *cost.backward_weight)
        # torch does not count attention on the CPU
        counted = [k for k in kernels if not k.name.endswith(("attention", "attention backward"))]
        total += count * products(tuple(counted))
    assert total == counter.get_total_flops()


def test_groups_of_a_convolution_divide_it() -> None:
    layer = nn.Conv2d(8, 12, 3, padding=1, groups=4)  # torch counts its weight gradient four times
    cost = workload_of(layer, torch.zeros(2, 8, 5, 5)).cost(0, Split(microbatch=2))
    product = (2 * 5 * 5, 12 / 4, 8 / 4 * 9, 4)  # m, n, k, groups
    assert [kernel[3:] for kernel in cost.forward if kernel.flops] == [product]
    assert products(cost.backward_weight) == products(cost.forward)
    assert products(cost.backward_input) == 0  # of data there is no gradient


def test_experts_in_one_product_count_their_tokens() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
            return torch._grouped_mm(x, self.weight, offs=ends)

    cost = workload_of(Experts(), torch.zeros(32, 8)).cost(0, Split(microbatch=32))
    assert [kernel[3:] for kernel in cost.forward if kernel.flops] == [(8, 16, 8, 4)]
    assert products(cost.backward_weight) == products(cost.forward) == 2 * 32 * 8 * 16


def test_ep_divides_experts_and_sends_tokens() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    batches = {rows: torch.zeros(rows, 8) for rows in (2, 4)}
    experts = {"1": frozenset({"1.weight"})}
    workload = trace_module(model, lambda x: model(x).sum(), batches, experts=experts)
    cost = workload.cost(1, Split(microbatch=4, ep=4))
    assert cost.parameters == 8 * 8 / 4
    tokens = ("all_to_all", "ep", 2 * 4 * 4 * 8)  # to two experts each
    assert [message[:3] for message in cost.forward_messages] == [tokens, tokens]
    assert workload.cost(1, Split(microbatch=4)).forward_messages == ()


def test_the_gradient_of_logits_is_memory_beside_what_is_kept() -> None:
    model = nn.Linear(16, 1000, bias=False)
    traced = workload_of(model, torch.zeros(64, 16), lambda logits: logits.log_softmax(-1).sum())
    assert traced.cost(0, Split(microbatch=64)).passing_bytes == pytest.approx(256_000, rel=1e-3)


def test_a_trace_under_autocast_is_that_of_a_gpu() -> None:
    """Logarithms are kept in 16 bits and a copy of them in fp32; a mask of dropout has a byte."""
    logits, table = nn.Linear(16, 1000, bias=False), 64 * 1000
    targets = torch.zeros(64, dtype=torch.long)
    kept = {}
    for name, model in (("plain", logits), ("dropout", nn.Sequential(logits, nn.Dropout()))):
        batches = {rows: torch.zeros(rows, 16) for rows in (32, 64)}
        traced = trace_module(
            model,
            lambda x, model=model: cross_entropy(model(x), targets[: len(x)]),
            batches,
            Precision("bf16", 4, 4, 0, 8),
        )
        costs = [traced.cost(run, Split(microbatch=64)) for run in range(len(traced.runs))]
        kept[name] = sum(cost.activation_bytes for cost in costs)
        kernels = [kernel.name for cost in costs for kernel in cost.forward]
        assert {"to_copy", "to_copy mixed", "log_softmax"} <= set(kernels)
    assert kept["plain"] == pytest.approx((2 + 4) * table + 2 * 64 * 16, rel=0.01)  # and the input
    assert kept["dropout"] - kept["plain"] == table
