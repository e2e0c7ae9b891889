"""Gradients and copies along the axes where workers have other tokens."""

from __future__ import annotations

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.replica.flat_params import FlatParams
from shoal.replica.split.token_axes import TokenAxes, TokenAxis
from shoal.strategy.strategy import Layout
from tests.conftest import World


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


def test_without_buckets_gradients_at_the_parameters_are_summed(world: World) -> None:
    def body(group: Group) -> tuple[list[float], list[float], bool, float]:
        mesh = Mesh.of(group, Layout(replicas=1, tp=1, pp=1, cp=2))
        model = Two()
        flat = FlatParams(model.named_parameters())
        used = model.shared if group.rank else model.expert
        used.sum().backward()
        axes = axes_of(mesh, model)
        axes.sum_parameter_gradients(flat.params)
        assert model.shared.grad is not None and model.expert.grad is not None
        total = axes.sum(torch.tensor(1.5))
        grads = model.shared.grad.tolist(), model.expert.grad.tolist()
        return *grads, model.unused.grad is None, float(total)

    assert world(2, body) == [([1.0] * 3, [1.0] * 2, True, 3.0)] * 2


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
