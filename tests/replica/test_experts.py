"""Mixtures of experts are found, and their tokens travel to the workers that have the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.errors import BadInput
from shoal.replica.expert.dispatch import Dispatch, ExpertPlacement
from shoal.replica.expert.forwards import ListedExperts
from shoal.replica.expert.mixtures import ListedMixture, mixtures_for, mixtures_of
from shoal.replica.expert.split import keep_first_experts
from shoal.replica.flat_params import FlatParams
from shoal.replica.split.mapping import even_ranges, gather_rows
from shoal.replica.split.shard import TokenAxes, TokenAxis
from shoal.runtime.trace import SentBytes
from shoal.strategy.split_terms import Ep
from shoal.strategy.strategy import Layout
from tests.conftest import World

WIDTH = 3
CHOICES = [[0, 2, 2, 3, 1], [3, 3, 2]]  # of the rows of 2 ranks, among 4 experts


def placement(group: Group, experts: int = 4, capacity: float | None = None) -> ExpertPlacement:
    return ExpertPlacement(group, even_ranges(experts, group.size), capacity)


def rows_of(rank: int) -> Tensor:
    """Row i of rank r is filled with 10 r + i."""
    numbers = torch.arange(len(CHOICES[rank])) + 10.0 * rank
    return numbers[:, None].repeat(1, WIDTH)


def test_an_expert_gets_its_rows_in_the_order_of_ranks(world: World) -> None:
    def body(group: Group) -> Any:
        dispatch = Dispatch(placement(group), torch.tensor(CHOICES[group.rank]))
        x = dispatch.to_experts(rows_of(group.rank)[dispatch.order])
        back = dispatch.to_sources(x * 2)
        assert torch.equal(back, rows_of(group.rank) * 2)
        return x[:, 0].tolist(), dispatch.local_experts.tolist(), dispatch.counts

    assert world(2, body) == [
        ([0.0, 4.0], [0, 1], [1, 1]),
        ([1.0, 2.0, 12.0, 3.0, 10.0, 11.0], [0, 0, 0, 1, 1, 1], [3, 3]),
    ]


@pytest.mark.parametrize("choices", [CHOICES, [[0, 1], [1]], [[], [3]]])
def test_two_exchanges_forward_and_two_backward(world: World, choices: list[list[int]]) -> None:
    """Counted bytes are those of the rows that leave their rank; a rank may have none."""

    def body(group: Group) -> Any:
        counted = SentBytes()
        dispatch = Dispatch(
            placement(group.counted(counted)), torch.tensor(choices[group.rank], dtype=torch.int64)
        )
        of_counts = counted.total
        x = torch.randn(len(choices[group.rank]), WIDTH, requires_grad=True)
        out = dispatch.to_sources(dispatch.to_experts(x[dispatch.order]) * 3)
        (out * 2).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0))
        return of_counts, counted.total - of_counts

    found = world(2, body)
    assert [counts for counts, _ in found] == [8 * 2, 8 * 2]  # of the 2 experts of the other
    leaving = sum(c // 2 != rank for rank, own in enumerate(choices) for c in own)
    assert sum(sent for _, sent in found) == 4 * leaving * WIDTH * 4


def test_a_capacity_keeps_the_first_rows_of_an_expert(world: World) -> None:
    def body(group: Group) -> Any:
        limited = placement(group, 4, capacity=1.0)
        return limited.keep(torch.tensor([2, 2, 0, 2, 9, 3])).tolist()

    assert world(2, body)[0] == [2, 2, 0, 4, 4, 3]  # 6 rows of 4 experts: 2 each; 9 is none


def test_gathered_rows_have_the_gradients_of_all_ranks(world: World) -> None:
    def body(group: Group) -> Any:
        x = torch.full((group.rank + 1, 2), float(group.rank), requires_grad=True)
        gathered = gather_rows(x, group)
        (gathered * (group.rank + 1)).sum().backward()
        return gathered[:, 0].tolist(), x.grad[0, 0].item()

    assert world(2, body) == [([0.0, 1.0, 1.0], 3.0)] * 2


def experts_of(model: nn.Module, patterns: list[str] | None = None) -> list[tuple[str, int]]:
    return [(m.name, m.num_experts) for m in mixtures_of(model, patterns)]


def list_of(n: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n))


def test_a_list_beside_a_router_is_a_mixture() -> None:
    model = nn.Module()
    model.layers = list_of(4)
    model.head = nn.Linear(WIDTH, 4)
    assert experts_of(model) == []
    assert experts_of(model, ["layers"]) == [("", 4)]
    model.router = nn.Linear(WIDTH, 4)
    assert experts_of(model) == [("", 4)]


def test_a_list_that_is_called_experts_is_a_mixture_unless_they_are_shared() -> None:
    model = nn.Module()
    model.shared_experts = list_of(2)
    assert experts_of(model) == []
    model.experts = nn.ModuleDict({f"e{i}": nn.Linear(WIDTH, WIDTH) for i in range(3)})
    assert experts_of(model) == [("", 3)]
    model.experts["e1"] = nn.Linear(WIDTH, WIDTH + 1)
    assert experts_of(model) == []


def test_experts_that_cannot_be_split_are_named() -> None:
    class DenseExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x @ self.weight * scale

    with pytest.raises(BadInput, match=r"0 is a DenseExperts that takes \(x, scale\)"):
        mixtures_for(nn.Sequential(DenseExperts()), Ep(2))


def test_an_estimate_counts_the_experts_of_one_worker() -> None:
    model = nn.Module()
    model.experts = list_of(4)
    keep_first_experts(mixtures_for(model, Ep(2)), 2)
    assert [name for name, _ in model.named_parameters()] == [
        *("experts.0.weight", "experts.0.bias", "experts.1.weight", "experts.1.bias"),
    ]


class Block(nn.Module):
    """`second` calls an expert with what another one returned."""

    def __init__(self, second: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = list_of(2)
        self.second = second
        self.register_buffer("calls", torch.zeros(()))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.losses.append(0.0)
        x *= 2  # in place, as routers that add noise do
        out: Tensor = self.experts[1](x)
        return self.experts[0](out) if self.second else out


def listed(group: Group, block: Block) -> Block:
    mixture = mixtures_of(block)[0]
    assert isinstance(mixture, ListedMixture)
    ListedExperts(mixture, placement(group, 2))
    return block


def test_a_block_is_run_twice_and_changes_its_state_once(world: World) -> None:
    blocks = [Block(), Block()]

    def body(group: Group) -> Any:
        block = listed(group, blocks[group.rank])
        return block(torch.ones(1, WIDTH)).shape, float(block.calls), len(block.losses)

    assert world(2, body) == [(torch.Size([1, WIDTH]), 1.0, 1)] * 2


def test_experts_that_depend_on_each_other_are_refused(world: World) -> None:
    blocks = [Block(second=True), Block(second=True)]
    with pytest.raises(BadInput, match="depend on what the experts return"):
        world(2, lambda group: listed(group, blocks[group.rank])(torch.ones(1, WIDTH)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.ones(3))
        self.expert = nn.Parameter(torch.ones(2))
        self.unused = nn.Parameter(torch.ones(2))


def axes_of(mesh: Mesh, model: Two) -> TokenAxes:
    return TokenAxes(TokenAxis(mesh.ep, lambda p: p is model.expert), TokenAxis(mesh.cp))


def test_a_bucket_is_summed_over_both_axes_and_a_slice_over_one(world: World) -> None:
    def body(group: Group) -> tuple[list[float], list[float], list[float]]:
        mesh = Mesh.of(group, Layout(replicas=1, tp=1, pp=1, ep=2, cp=2))
        model = Two()
        flat = FlatParams(model.named_parameters())
        flat.grads.watch(flat.buckets(1))
        flat.grads.sum_gradients = axes_of(mesh, model).sum_gradients
        flat.grads.record_loss(torch.tensor(1.0))
        flat.grads.arm(lambda bucket: None)
        weight = 10.0**group.rank
        loss = model.shared.sum() * weight
        if group.rank == 3:  # the others have no token for their expert
            loss = loss + model.expert.sum() * weight
        loss.backward()
        flat.grads.flush()
        flat.grads.publish()
        assert model.unused.grad is None and model.shared.grad is not None
        expert = [] if model.expert.grad is None else model.expert.grad.tolist()
        return model.shared.grad.tolist(), expert, flat.grads.header.tolist()

    header = [4.0, 4.0, 1.0, 0.0]
    here = ([1111.0] * 3, [1000.0] * 2, header)
    assert world(4, body) == [([1111.0] * 3, [0.0] * 2, header)] * 2 + [here] * 2


def test_copies_are_those_of_the_first_rank_and_slices_stay(world: World) -> None:
    def body(group: Group) -> tuple[float, float, bool, bool]:
        mesh = Mesh.of(group, Layout(replicas=1, tp=1, pp=1, ep=2))
        model = Two()
        axes = axes_of(mesh, model)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(group.rank)
            axes.synchronize_copies({p: p for p in model.parameters()})
        duplicates = axes.is_duplicate(model.shared), axes.is_duplicate(model.expert)
        return model.shared[0].item(), model.expert[0].item(), *duplicates

    assert world(2, body) == [(0.0, 0.0, False, False), (0.0, 1.0, True, False)]
