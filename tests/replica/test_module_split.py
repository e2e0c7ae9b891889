"""Models whose forward cannot be traced are split between calls of their modules."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.pipeline.replay_split import find_units
from shoal.replica.pipeline.stages import Stages
from shoal.runtime.pytree import tensors_of
from tests.conftest import World
from tests.models import samples
from tests.scripts import shoal
from tests.splitting import assert_equal, model, refused, workers


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


Blocks = Callable[["Net", Tensor, Tensor, float], Tensor]  # between its first and last layers


class Net(nn.Module):
    """What it does before and behind its layers depends on the values of the input."""

    def __init__(self, blocks: Blocks | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks_of = blocks
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
        return self.last(self.drop(self.head(hidden)))

    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        if self.blocks_of is not None:
            return self.blocks_of(self, hidden, mask, scale)
        for layer in self.layers:
            hidden = layer(hidden, mask, scale=scale)
        return hidden


def test_a_stage_holds_what_it_calls() -> None:
    stages = Stages(Net(), 3)
    assert stages.cuts == ("layers.2", "layers.4")
    assert stages.holders["layers.1.up.weight"] == (0,)
    assert stages.holders["layers.2.up.weight"] == (1,)
    assert stages.holders["first.weight"] == (0,)
    assert stages.holders["last.bias"] == stages.holders["norm.weight"] == (2,)
    assert Stages(Embedded(), 2, cuts=["norm"]).holders["first.weight"] == (0, 1)  # called twice


def test_the_same_bits(world: World) -> None:
    options = {"exact": True, "microbatches": 4}
    assert_equal(world, 2, "pp(2)", Net, samples(24), 8, exactly=True, **options)


def test_stages_in_a_row_drop_what_the_model_drops() -> None:
    model = Net(dropout=0.5)
    stages = Stages(model, 3)
    x = samples(8).tensors[0]
    torch.manual_seed(5)
    expected = model(x)
    for _ in range(2):
        values: Any = (x,)
        for virtual in range(3):
            torch.manual_seed(5)
            values = stages.compute(virtual, x, values)
        assert torch.equal(values, expected)


def choosy(net: Net, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    for layer in net.layers:
        hidden = layer(hidden, mask, scale=scale) if hidden.sum() > -1e9 else hidden
    return hidden


def scaling(net: Net, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    for i, layer in enumerate(net.layers):
        hidden = layer(x=hidden, mask=mask, scale=scale + i) * 0.9
    return hidden


def in_order(*order: int) -> Blocks:
    def blocks(net: Net, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        for i in order:
            hidden = net.layers[i](hidden, mask, scale=scale)
        return hidden

    return blocks


def skipping(net: Net, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    return hidden + in_order(*range(6))(net, hidden, mask, scale)


def in_place(net: Net, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    for layer in net.layers:
        hidden = layer(hidden, mask, scale=scale)
        hidden += mask
        hidden[:, 0] *= 0.5
    return hidden


class Weighted(Net):
    """A parameter of no module's own forward, and a module whose weight is used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(5))

    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        hidden = super().blocks(hidden * self.gain, mask, scale)
        return hidden * self.gain + self.norm.weight


class Pair(NamedTuple):
    value: Tensor
    number: int


@dataclass
class Carried:
    hidden: Tensor
    extra: Pair
    nothing: None = None


class CarryingLayer(Layer):
    def forward(self, x: Any, mask: Tensor, *, scale: float) -> Any:
        hidden = super().forward(x.hidden, mask, scale=scale + 0.1 * x.extra.number)
        extra = Pair(x.extra.value + hidden.tanh(), x.extra.number + 1)
        return Carried(hidden, extra)


class Carrying(Net):
    """Layers return a dataclass with a named tuple and None inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CarryingLayer() for _ in range(6))

    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        carried = Carried(hidden, Pair(hidden, 0))
        for layer in self.layers:
            carried = layer(carried, mask, scale=scale)
        assert carried.extra.number == 6
        return carried.hidden + carried.extra.value


class TwoTowers(Net):
    """A decoder whose layers use the encoder's result; registered first, called last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.decoder = nn.ModuleList(nn.Bilinear(5, 5, 5) for _ in range(3))
        self.layers = self._modules.pop("layers")

    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        encoded = super().blocks(hidden, mask, scale)
        for layer in self.decoder:
            hidden = torch.tanh(layer(hidden, encoded))
        return hidden


def computing(net: Net, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Its result is that of the whole batch's micro-batches: nothing is decided by values."""
    kept = []
    for layer in net.layers:
        hidden = layer(hidden, mask, scale=scale).softmax(-1)
        kept.append(hidden.detach())
    return hidden + torch.stack(kept).mean(0)


backward = in_order(1, 0, 2, 3, 4, 5)


@pytest.mark.product
@pytest.mark.parametrize(
    "strategy",
    [
        *("pp(2)", 'pp(3, schedule="zb-h1")', 'pp(2, schedule="interleaved", recompute=True)'),
        *("ddp + pp(2)", "tp(2) + pp(2)", "tp(2, sequence=True) + pp(2)"),
        'tp(2, plan={"first": "column", "last": "column"}) + pp(2)',  # of other stages, too
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        *(Net, Weighted, Carrying, TwoTowers, partial(Net, in_order(0, 0, 1, 2, 3, 4, 5, 5))),
        *(partial(Net, blocks) for blocks in (scaling, backward, skipping, in_place, computing)),
    ],
)
def test_code_between_modules(world: World, make: Callable[[], nn.Module], strategy: str) -> None:
    if "interleaved" in strategy and getattr(make, "args", ()) == (backward,):
        pytest.skip("four stages would cut before a layer that is called later")
    assert_equal(world, workers(strategy), strategy, make, samples(28), 12, clip_norm=0.1)


class Dropping(Net):
    """LayerDrop, by torch's and Python's random numbers; dropout draws between."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def blocks(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        first = hidden
        for i, layer in enumerate(self.layers):
            drawn = float(torch.rand(())) if i % 2 else random.random()
            if self.training and drawn < 0.5:
                continue
            hidden = layer(hidden, mask, scale=scale)
        return hidden + first


ROOT = str(Path(__file__).parents[2])
SCRIPT = """
from functools import partial
import shoal, torch
from tests.models import samples
from tests.replica.test_module_split import Dropping

def train(job):
    sgd = partial(torch.optim.SGD, lr=0.1)
    step = job.step(Dropping(), torch.nn.functional.cross_entropy, optimizer=sgd, accumulate=4)
    state = torch.get_rng_state()
    for batch in job.batches(samples(40), 8):
        job.log(loss=step(batch))
    job.print(torch.equal(torch.get_rng_state(), state))

shoal.run(train)
"""


@pytest.mark.whole
@pytest.mark.parametrize("cut", ["layers.1", "layers.3", "norm"])
def test_layers_that_are_skipped_at_random(tmp_path: Path, cut: str) -> None:
    """In processes: threads share the generators."""
    (tmp_path / "skips.py").write_text(SCRIPT)
    words = ("verify", "-n", "2", "-s", f'pp(2, cuts=["{cut}"])', "skips.py")
    done = shoal(*words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_step_and_its_proof_leave_the_random_numbers_of_the_script_alone(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(SCRIPT)
    done = shoal("run", "-n", "2", "-s", "pp(2)", "draws.py", cwd=tmp_path, PYTHONPATH=ROOT)
    assert "[0] True\n" in done.stdout, done.stderr


def test_a_stage_gets_what_it_uses() -> None:
    """Once the first batch was seen, results that later stages do not use are not sent."""
    stages = Stages(Net(skipping), 3)
    x = samples(8).tensors[0]

    def sent() -> list[int]:
        values: Any = (x,)
        counts = []
        for virtual in range(3):
            values = stages.compute(virtual, x, values)
            counts.append(len(tensors_of(values)))
        return counts

    assert sent() == [3, 5, 1]
    stages.learn(stages.usage(), [])
    assert sent() == [2, 2, 1]  # what the last layer returned, and what the first module did


def opening(net: Net, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
    return in_order(*range(6))(net, hidden @ net.head.weight, mask, scale)


class StrangeLayer(Layer):
    def forward(self, x: Any, mask: Tensor, *, scale: float) -> Any:
        return super().forward(x, mask, scale=scale), object()


class Returning(Net):
    def __init__(self) -> None:
        super().__init__(lambda net, x, mask, scale: net.layers[0](x, mask, scale=scale)[0])
        self.layers = nn.ModuleList(StrangeLayer() for _ in range(6))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(Net, choosy), "decides by the values that first returned, before it calls layers"),
        (
            partial(Net, in_order(5, 1, 2, 3, 4, 0)),
            "Net .* split at layers.3, since it calls layers.1 behind modules of a later stage "
            r"\(its calls so far fit a cut at layers.0, layers.1, norm, head",
        ),
        (partial(Net, opening), "computes with head.weight outside of the forward of its module"),
        (Returning, "layers.0 returns a object, which cannot be sent to the stages behind it"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    world: World, make: Callable[[], nn.Module], said: str
) -> None:
    assert re.search(said, refused(world, 2, "pp(2)", make, samples(8)))


class Embedded(Net):
    """One layer reads sources and, behind the encoder, targets; a method calls its object `s`."""

    def forward(s, x: Tensor) -> Tensor:
        hidden = s.first(x) if x.isfinite().all() else x
        for layer in s.layers[:3]:
            hidden = layer(hidden, x[:, :1], scale=0.5)
        hidden = s.norm(hidden) + s.first(x.flip(1))
        return s.last(s.head(hidden))


@pytest.mark.parametrize("cut", ["layers.1", "norm", "head"])
def test_a_module_that_is_called_again_on_a_later_stage(world: World, cut: str) -> None:
    assert_equal(world, 2, f'pp(2, cuts=["{cut}"])', Embedded, samples(12), 12, microbatches=2)


@model(a=(6, 3), b=(6, 3))
def looking(self: Any, x: Tensor) -> Tensor:
    return self.b(x) if x.shape[0] and x.sum() > -1e9 else self.a(x)


def test_decisions_by_the_inputs(world: World) -> None:
    assert_equal(world, 2, "pp(2)", looking, samples(24), 8)


@model(a=(6, 6), b=(6, 3))
def noisy(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x) if torch.rand(()) > 0.5 else x)


def test_random_numbers_outside_of_modules_are_not_traced() -> None:
    """They would be the same in every step."""
    assert Stages(noisy(), 2).replays


def test_an_encoder_of_torch_is_opened(world: World) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        return nn.Sequential(nn.Unflatten(1, (1, 6)), encoder, nn.Flatten(), nn.Linear(6, 3))

    assert Stages(make(), 2).cuts == ("1.layers.2",)
    assert_equal(world, 2, "pp(2)", make, samples(16), 8)


def test_too_few_modules_and_wrong_cuts_are_refused() -> None:
    with pytest.raises(BadInput, match=r"cannot be split into 99 stages: it has \d+ modules"):
        Stages(Net(), 99)
    with pytest.raises(BadInput, match=r"2 stages at 1 of layers.0, layers.1, .* head, last, in"):
        Stages(Net(), 2, cuts=["nothing"])


class _NormAndAct(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(6)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


@model(first=(6, 6), second=(6, 6))
def block(self: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(self.second(torch.tanh(self.first(x))))


@model(block=block, norm=_NormAndAct, head=(6, 3))
def normed_outside(self: Any, x: Tensor) -> Tensor:
    """It is best split inside of its block; the norm behind it has a module inside, too."""
    return self.head(self.norm(self.block(x) if x.isfinite().all() else x))


def test_a_norm_with_an_activation_inside_belongs_to_one_stage(world: World) -> None:
    for deeper in range(3):
        assert "norm" in [unit.name for unit in find_units(normed_outside(), deeper=deeper)]
    assert Stages(normed_outside(), 2).holders["norm.running_mean"] == (1,)
    assert_equal(world, 2, "pp(2)", normed_outside, samples(24), batch_size=8)
