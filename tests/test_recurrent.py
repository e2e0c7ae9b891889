"""LSTM and GRU whose hidden units tp splits train as on one worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.replica.tensor.layers.recurrent import ParallelRecurrent
from shoal.replica.tensor.rng import TensorParallelRng
from tests.conftest import World
from tests.models import samples
from tests.models.vision import GruClassifier, LstmLanguageModel, labelled_words, own, words
from tests.models.zoo import logits_loss, token_loss
from tests.seeds import seeded
from tests.splitting import assert_equal, job_of, whole

sequences = partial(samples, shape=(5, 4))


class Recurrent(nn.Module):
    @seeded(0)
    def __init__(self, kind: type[nn.RNNBase], **options: Any):
        super().__init__()
        self.rnn = kind(4, 7, batch_first=True, **options)
        self.head = nn.Linear(7 * (1 + self.rnn.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(x)[0].mean(1))
        return logits


@pytest.mark.parametrize(
    ("size", "strategy", "options"),
    [
        (2, "tp(2)", {"kind": nn.LSTM, "num_layers": 2}),
        (2, "tp(2)", {"kind": nn.GRU, "bidirectional": True, "bias": False}),
        (4, "ddp + tp(2)", {"kind": nn.GRU}),
        pytest.param(3, "tp(3)", {"kind": nn.LSTM, "bidirectional": True}, marks=pytest.mark.whole),
        pytest.param(4, "zero(3) + tp(2)", {"kind": nn.LSTM}, marks=pytest.mark.whole),
        pytest.param(4, "tp(2) + pp(2)", {"kind": nn.LSTM}, marks=pytest.mark.whole),
        pytest.param(2, "tp(2, sequence=True)", {"kind": nn.GRU}, marks=pytest.mark.whole),
    ],
)
def test_hidden_units(world: World, size: int, strategy: str, options: dict[str, Any]) -> None:
    assert_equal(world, size, strategy, partial(Recurrent, **options), sequences(8), 4)


class Bridged(nn.Module):
    """An encoder whose last state becomes the first one of a decoder, by a layer between them."""

    @seeded(0)
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.enc = kind(4, 8, batch_first=True, bidirectional=True)
        self.br = nn.Linear(16, 8)
        self.dec = kind(4, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        _, last = self.enc(pack_padded_sequence(x, lengths, batch_first=True))
        h = last[0] if isinstance(last, tuple) else last
        h = self.br(torch.cat([h[0], h[1]], -1)).tanh()[None]
        y = self.dec(x, (h, torch.zeros_like(h)) if isinstance(last, tuple) else h)[0]
        logits: Tensor = self.out(y.mean(1))
        return logits


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_layer_makes_the_first_state(world: World, kind: type[nn.RNNBase]) -> None:
    assert_equal(world, 2, "tp(2)", partial(Bridged, kind), sequences(8), 4)


@pytest.mark.whole
@pytest.mark.parametrize(("size", "strategy"), [(2, "tp(2)"), (4, "ddp + tp(2)")])
@pytest.mark.parametrize(
    ("make", "data", "loss"),
    [(LstmLanguageModel, words, token_loss), (GruClassifier, labelled_words, logits_loss)],
)
def test_models_of_the_zoo(
    world: World, size: int, strategy: str, make: Any, data: Any, loss: Any
) -> None:
    dataset = TensorDataset(*data(8))
    assert_equal(world, size, strategy, partial(own, make), dataset, 4, loss=loss)


@pytest.mark.parametrize(("first", "second"), [("tp(2)", "single"), ("single", "tp(2)")])
def test_another_strategy_goes_on_from_a_checkpoint(
    world: World, tmp_path: Path, first: str, second: str
) -> None:
    def go(group: Group, strategy: str, model: nn.Module, steps: int, load: bool) -> Any:
        with job_of(group, strategy, model) as (job, step):
            if load:
                job.load(tmp_path)
            for batch in job.batches(sequences(16), 4, steps=steps):
                step(batch)
            if not load:
                job.save(tmp_path)
            return whole(step)

    def run(strategy: str, steps: int, load: bool = False) -> Any:
        models = [Recurrent(nn.GRU) for _ in range(1 if strategy == "single" else 2)]
        return world(len(models), lambda g: go(g, strategy, models[g.rank], steps, load))[0]

    run(first, 2)
    resumed = run(second, 4, load=True)
    for name, tensor in run("single", 4).items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch", [(3,), ()], ids=["batched", "unbatched"])
def test_initial_states_and_their_gradients(
    world: World, kind: type[nn.RNNBase], batch: tuple[int, ...]
) -> None:
    def outcome(layer: nn.Module) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, *states = (
            torch.randn(*shape, generator=generator, requires_grad=True)
            for shape in ((5, *batch, 4), *[(4, *batch, 7)] * (2 if kind is nn.LSTM else 1))
        )
        out, last = layer(x, tuple(states) if kind is nn.LSTM else states[0])
        ends = list(last) if kind is nn.LSTM else [last]
        total = sum((t * t.detach().cos()).sum() for t in (out, *ends))
        return [out, *ends, *torch.autograd.grad(total, [x, *states])]

    def make() -> nn.RNNBase:
        torch.manual_seed(0)
        return kind(4, 7, num_layers=2, bidirectional=True)

    layers = [make() for _ in range(2)]

    def body(group: Group) -> list[Tensor]:
        split = ParallelRecurrent(layers[group.rank], group, TensorParallelRng(group.rank, False))
        for name, spec in split.specs.items():
            p = getattr(split, name)
            p.data = spec.take_shard(p.detach(), group.rank)
        return outcome(split)

    wanted = outcome(make())
    for got in world(2, body):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_each_worker_has_its_units_of_every_gate(world: World) -> None:
    def shapes(group: Group) -> Any:
        with job_of(group, "tp(2)", Recurrent(nn.LSTM)) as (_, step):
            return {n: tuple(p.shape) for n, p in step.model.rnn.named_parameters()}

    first = world(2, shapes)[0]
    assert first["weight_hh_l0"] == (16, 7)
    assert first["bias_ih_l0"] == (16,)


class Packed(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] * 100).long().abs() % x.shape[1]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        ends = last[0] if isinstance(last, tuple) else last
        logits: Tensor = self.head(padded.sum(1)) + ends[-1, :, :3]
        return logits


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(world: World, kind: type[nn.RNNBase]) -> None:
    make = partial(Packed, kind, bidirectional=True)
    assert_equal(world, 2, "tp(2)", make, sequences(8), 4)
