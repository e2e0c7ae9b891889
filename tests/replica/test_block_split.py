"""Models whose forward cannot be traced are cut between the blocks of their trunk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.pipeline.stages import Stages
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal, train


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(5, 21)
        self.down = nn.Linear(21, 5)
        self.drop = nn.Dropout(dropout)

    def split_plan(self) -> dict[str, tuple[str, int]]:
        return {"up": ("column", 1), "down": ("row", 1)}

    def forward(self, x: Tensor, mask: Tensor, *, scale: float) -> Tensor:
        return x + scale * mask * self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """What it does before and behind its layers depends on the values of the input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(6))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 5)
        self.head.weight = nn.Parameter(self.first.weight[:, :5].clone())
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.5 if x.isfinite().all() else 0.0
        mask = (x[:, :1] > 0).float()
        hidden = self.drop(self.first(x))
        hidden = self.blocks(hidden, mask, scale)
        if x.isfinite().all():
            hidden = self.norm(hidden)
        logits: Tensor = self.last(self.drop(self.head(hidden)))
        return logits

    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask, scale=scale)
        return hidden


def test_it_is_cut_between_blocks_and_the_rest_is_at_both_ends() -> None:
    stages = Stages(Net(), 3)
    assert stages.cuts == ("layers.2", "layers.4")
    assert stages.holders["layers.1.up.weight"] == (0,)
    assert stages.holders["layers.2.up.weight"] == (1,)
    assert stages.holders["first.weight"] == stages.holders["last.bias"] == (0, 2)


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "pp(2)"),
        (3, "pp(3)"),
        (2, 'pp(2, schedule="interleaved")'),
        (2, 'pp(2, schedule="zb-h1", recompute=True)'),
        (2, 'pp(2, cuts=["layers.1"])'),
        (4, "tp(2) + pp(2)"),
        (4, "tp(2, sequence=True) + pp(2)"),
        (4, "ddp + pp(2)"),
    ],
)
def test_it_trains_as_on_one_worker(world: World, size: int, strategy: str) -> None:
    assert_equal(world, size, strategy, Net, samples(28), 12, clip_norm=0.1)


def test_the_same_bits(world: World) -> None:
    options = {"exact": True, "microbatches": 4}
    assert_equal(world, 2, "pp(2)", Net, samples(24), 8, exactly=True, **options)


def test_stages_in_a_row_drop_what_the_model_drops() -> None:
    model = Net(0.5)
    stages = Stages(model, 3)
    x = samples(8).tensors[0]
    torch.manual_seed(5)
    expected = model(x)
    for _ in range(2):  # the first time it is looked at in full
        torch.manual_seed(5)
        values = (x,)
        for virtual in range(3):
            values = stages.segment(virtual, ("x",))(*values)
        assert torch.equal(values, expected)


class Choosy(Net):
    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask, scale=scale) if hidden.sum() > -1e9 else hidden
        return hidden


class Scaling(Net):
    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask, scale=scale) * 0.9
        return hidden


class Growing(Net):
    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, mask, scale=scale + i)
        return hidden


class Backward(Net):
    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        for i in (1, 0, 2, 3, 4, 5):
            hidden = self.layers[i](hidden, mask, scale=scale)
        return hidden


class Skipping(Net):
    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        return hidden + super().blocks(hidden, mask, scale)


class Named(Net):
    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        for layer in self.layers:
            hidden = layer(x=hidden, mask=mask, scale=scale)
        return hidden


class Short(Net):
    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        return super().blocks(hidden, mask, scale) if float(hidden.sum()) > 1e9 else hidden


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Choosy, r"Choosy .* between its blocks layers.0 to layers.5, since it computes \(sum\)"),
        (Scaling, r"computes \(mul\) between them"),
        (Growing, "gives layers.1 other arguments than those before it"),
        (Backward, "does not call them in their order, each once"),
        (Skipping, "uses behind its blocks what it computes before them"),
        (Named, "calls layers.3 without a tensor as its first argument"),
        (Short, "does not call layers.3: put what is special into the blocks"),
    ],
)
def test_a_forward_that_does_more_with_its_blocks_is_refused(
    world: World, make: Callable[[], nn.Module], said: str
) -> None:
    models = [make(), make()]
    with pytest.raises(BadInput, match=said):
        world(2, lambda g: train(g, "pp(2)", models[g.rank], samples(8), 8))


def test_without_a_trunk_it_is_refused_by_name() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(x) if x.sum() > 0 else self.a(x)
            return out

    with pytest.raises(
        BadInput, match="the forward of Looking cannot be split into stages"
    ) as error:
        Stages(Looking(), 2)
    assert "put that code into a module of its own" in str(error.value)


def test_too_few_blocks_and_wrong_cuts_are_refused() -> None:
    with pytest.raises(
        BadInput, match=r"cannot be split into 7 stages: .* it has a row of 6 blocks"
    ):
        Stages(Net(), 7)
    with pytest.raises(BadInput, match=r"2 stages at 1 of layers.1, layers.2"):
        Stages(Net(), 2, cuts=["head"])
