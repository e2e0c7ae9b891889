"""Input gradients and weight gradients together are the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.examples.gpt import GPT, Size
from shoal.replica.pipeline.split_backward import SplitBackward


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.tanh(self.layer(x)))
        return out


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x * self.scale).chunk(2, dim=1)
        return x + self.second(torch.cat([second, first.exp()], dim=1))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)),
    "one parameter": lambda: nn.Linear(4, 4, bias=False),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "lstm": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), Last(nn.LSTM(2, 3, batch_first=True))),
    "used twice": Twice,
    "skipping": Skipping,
}


class Last(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_input", [True, False])
def test_halves_add_up_to_a_backward(name: str, with_input: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(3, 4, requires_grad=with_input)
    out = model(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted = {n: p.grad for n, p in model.named_parameters()}

    split = SplitBackward([model(x)], [grad])
    leaves = split.input_grads([x] if with_input else [])
    if with_input:
        torch.testing.assert_close(leaves[0], x.grad)
    found = {id(p): g for p, g in split.weight_grads()}
    assert len(found) == sum(g is not None for g in wanted.values())
    for n, p in model.named_parameters():
        if wanted[n] is not None:
            torch.testing.assert_close(found[id(p)], wanted[n])


def test_a_gpt_with_tied_embedding() -> None:
    torch.manual_seed(0)
    model = GPT(Size(2, 16, 2, 8, 1e-3))
    tokens = torch.randint(0, 90, (2, 8))

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    loss().backward()
    split = SplitBackward([loss()], [None])
    assert split.input_grads([]) == []
    found = {id(p): g for p, g in split.weight_grads()}
    for p in model.parameters():
        torch.testing.assert_close(found[id(p)], p.grad)


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        Counted.calls += 1
        return grad


def test_the_second_half_does_not_repeat_the_first() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    x = torch.randn(2, 4, requires_grad=True)
    out = x
    for layer in layers:
        out = Counted.apply(layer(out))
    Counted.calls = 0
    split = SplitBackward([out.sum()], [None])
    split.input_grads([x])
    assert Counted.calls == 3
    assert len(split.weight_grads()) == 6
    assert Counted.calls == 3
