"""Which parts of a model are gathered together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.examples.gpt import GPT, Size
from shoal.replica.fsdp.unit_gather import wrap_modules
from tests.conftest import World
from tests.models import mlp
from tests.splitting import job_of


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in wrap_modules(model, list(model.parameters()))]


def test_blocks_are_units_and_small_modules_join_the_root() -> None:
    with torch.device("meta"):
        model = GPT(Size(layers=12, width=64, heads=2, context=32, lr=1e-3))
    assert names(model) == ["", *(f"blocks.{i}" for i in range(12))]
    root = wrap_modules(model, list(model.parameters()))[0]
    assert {tuple(p.shape) for p in root.params} == {(98, 64), (32, 64), (64,)}


def test_blocks_that_are_large_beside_the_model_are_divided() -> None:
    with torch.device("meta"):
        model = GPT(Size(layers=2, width=64, heads=2, context=32, lr=1e-3))
    found = names(model)
    assert "blocks.0.mlp.up" in found and "blocks.1.attention.qkv" in found


def test_every_parameter_is_in_one_unit() -> None:
    for model in (mlp(), nn.Linear(3, 3), nn.TransformerEncoderLayer(8, 2, 16)):
        units = wrap_modules(model, list(model.parameters()))
        found = [id(p) for unit in units for p in unit.params]
        assert sorted(found) == sorted(id(p) for p in model.parameters())


def test_a_module_with_parameters_of_its_own_is_not_divided() -> None:
    """Attention uses the weight of its output projection outside that module's forward."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)))
    assert {"0.self_attn", "1.self_attn"} <= set(names(model))


class _TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x))


def test_a_module_that_is_called_by_itself_has_its_parameters(world: World) -> None:
    models = [_TwoParts() for _ in range(2)]
    x = torch.randn(4, 6)
    expected = _TwoParts()(x)

    def body(group: Group) -> Tensor:
        model = models[group.rank]
        with job_of(group, "zero(3)", model), torch.no_grad():
            out: Tensor = model.head(model.encoder(x))
            return out

    for found in world(2, body):
        assert torch.equal(found, expected)
