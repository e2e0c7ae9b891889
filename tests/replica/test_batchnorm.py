"""BatchNorm over several ranks is BatchNorm of the concatenated batch."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.batchnorm import (
    ForwardState,
    GlobalBatchNorm,
    has_batchnorm,
    update_running_statistics,
    use_global_batchnorm,
    use_microbatch_norm,
)
from shoal.replica.split.attributes import copy_structure
from tests.conftest import World
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import assert_equal, train

CHANNELS = 4
SHAPES: list[tuple[type[_BatchNorm], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (CHANNELS,)),
    (nn.BatchNorm1d, (CHANNELS, 5)),
    (nn.BatchNorm2d, (CHANNELS, 3, 2)),
    (nn.BatchNorm3d, (CHANNELS, 2, 3, 2)),
]


def layer_of(kind: type[_BatchNorm], dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    layer: Any = kind(CHANNELS, **options)
    generator = torch.Generator().manual_seed(5)
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=generator) + 1
    return layer.to(dtype)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype) * 3 + 10


def outcome(layer: Any, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """What one layer makes of some batches: outputs, gradients, running statistics."""
    out, grad_x = [], []
    for x, slope in batches:
        x = x.clone().requires_grad_()
        out.append(layer(x))
        (out[-1] * slope).sum().backward()
        grad_x.append(x.grad)
    grads = [p.grad for p in layer.parameters()]
    out = [o.detach() for o in out]
    return SimpleNamespace(out=out, grad_x=grad_x, grads=grads, buffers=dict(layer.named_buffers()))


def compare(
    world: World,
    kind: type[_BatchNorm],
    shape: tuple[int, ...],
    parts: list[int],
    steps: int = 2,
    training: bool = True,
    **options: Any,
) -> None:
    """A part of 0 samples runs one row that stands in, and whose loss has no weight."""
    whole = layer_of(kind, **options).train(training)
    layers = [copy.deepcopy(whole) for _ in parts]
    x = [numbers(sum(parts), *shape, seed=s) for s in range(steps)]
    slope = [numbers(sum(parts), *shape, seed=100 + s) for s in range(steps)]
    wanted = outcome(whole, list(zip(x, slope, strict=True)))

    def body(group: Group) -> Any:
        forward_state = ForwardState()
        forward_state.rows_are_real = parts[group.rank] > 0
        layer = GlobalBatchNorm(layers[group.rank], group, forward_state)
        pieces = [
            (a.split(parts)[group.rank], b.split(parts)[group.rank])
            for a, b in zip(x, slope, strict=True)
        ]
        if not forward_state.rows_are_real:
            pieces = [(numbers(1, *shape, seed=9) * 50, torch.zeros(1, *shape))] * steps
        return outcome(layer, pieces)

    got = world(len(parts), body)
    real = [g for g, part in zip(got, parts, strict=True) if part]
    close = {"rtol": 1e-11, "atol": 1e-11}
    for s in range(steps):
        torch.testing.assert_close(torch.cat([g.out[s] for g in real]), wanted.out[s], **close)
        torch.testing.assert_close(
            torch.cat([g.grad_x[s] for g in real]), wanted.grad_x[s], **close
        )
    for i, grad in enumerate(wanted.grads):
        torch.testing.assert_close(sum(g.grads[i] for g in got), grad, **close)
    for g, part in zip(got, parts, strict=True):
        torch.testing.assert_close(g.buffers, wanted.buffers, **close)
        assert part or not any(grad.any() for grad in g.grad_x)


@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=lambda v: str(getattr(v, "__name__", v)))
@pytest.mark.parametrize("parts", [[4, 4], [3, 3, 3]], ids=str)
def test_equals_the_layer_on_the_concatenated_batch(
    world: World, kind: type[_BatchNorm], shape: tuple[int, ...], parts: list[int]
) -> None:
    compare(world, kind, shape, parts)


@pytest.mark.parametrize("parts", [[7, 1, 2], [1, 1], [0, 3], [3, 0, 2], [0, 0, 2]], ids=str)
def test_parts_may_be_uneven_and_rows_that_stand_in_do_not_count(
    world: World, parts: list[int]
) -> None:
    compare(world, nn.BatchNorm1d, (CHANNELS,), parts)
    compare(world, nn.BatchNorm2d, (CHANNELS, 3, 2), parts)


@pytest.mark.parametrize(
    "options",
    [
        *({"affine": False}, {"momentum": None}, {"momentum": 0.4}, {"eps": 0.5}),
        *({"track_running_stats": False}, {"affine": False, "track_running_stats": False}),
        *({"training": False}, {"training": False, "track_running_stats": False}),
        *([{"bias": False}] if "bias" in inspect.signature(nn.BatchNorm1d).parameters else []),
    ],
    ids=str,
)
def test_options_mean_what_they_mean_on_one_device(world: World, options: dict[str, Any]) -> None:
    compare(world, nn.BatchNorm1d, (CHANNELS,), [2, 3], steps=3, **options)


def test_a_microbatch_that_is_empty_on_every_rank_changes_nothing(world: World) -> None:
    """The last batch has 3 samples for 4 micro-batches."""

    @seeded(0)
    def make() -> nn.Module:
        convolution = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(16, 3))

    data = samples(11, (1, 4, 4))
    assert_equal(world, 2, "ddp", make, data, 8, accumulate=4)
    state = train(solo_group(), "single", make(), data, 8, accumulate=4)[1]
    assert state["1.num_batches_tracked"] == 4 + 3


@pytest.mark.parametrize(("shift", "dtype"), [(1e4, torch.float32), (0.0, torch.bfloat16)], ids=str)
def test_statistics_are_computed_in_enough_digits(
    world: World, shift: float, dtype: torch.dtype
) -> None:
    """The variance of float32 numbers around 10,000 would cancel in a sum of squares."""
    x = (numbers(8, CHANNELS, dtype=torch.float32) + shift).to(dtype)
    layers = [layer_of(nn.BatchNorm1d, torch.float32) for _ in range(2)]

    def body(group: Group) -> Tensor:
        layer = GlobalBatchNorm(layers[group.rank], group, ForwardState())
        out: Tensor = layer(x.chunk(2)[group.rank])
        return out.detach()

    out = torch.cat(world(2, body))
    assert out.dtype == dtype
    wanted = layer_of(nn.BatchNorm1d)(x.double()).detach()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)


def test_one_value_per_channel_is_refused_as_on_one_device(world: World) -> None:
    layers = [layer_of(nn.BatchNorm1d) for _ in range(2)]

    def body(group: Group) -> None:
        forward_state = ForwardState()
        forward_state.rows_are_real = group.rank == 0
        GlobalBatchNorm(layers[group.rank], group, forward_state)(numbers(1, CHANNELS))

    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer_of(nn.BatchNorm1d)(numbers(1, CHANNELS))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        world(2, body)


def test_a_wrong_number_of_dimensions_is_refused_as_on_one_device() -> None:
    local = layer_of(nn.BatchNorm2d)
    for layer in (local, GlobalBatchNorm(local, solo_group(), ForwardState())):
        with pytest.raises(ValueError, match="expected"):
            layer(numbers(3, CHANNELS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.norm = self.again = nn.BatchNorm1d(4)
        self.other = nn.InstanceNorm1d(4)


def test_every_batchnorm_of_a_model_is_replaced_and_nothing_is_renamed() -> None:
    """One that is used twice stays one; other norms stay."""
    net = Net()
    names = list(net.state_dict())
    parameters = list(net.parameters())
    assert has_batchnorm(net)
    use_global_batchnorm(net, solo_group())
    assert isinstance(net.body[1], GlobalBatchNorm) and net.norm is net.again
    assert isinstance(net.norm, GlobalBatchNorm) and isinstance(net.other, nn.InstanceNorm1d)
    assert list(net.state_dict()) == names
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_a_copy_of_a_model_keeps_its_batchnorm() -> None:
    net = Net()
    use_global_batchnorm(net, solo_group())
    twin = copy.deepcopy(net)
    assert isinstance(twin.norm, GlobalBatchNorm)
    twin.norm(numbers(3, 4, dtype=torch.float32))
    assert twin.norm.num_batches_tracked == 1 and net.norm.num_batches_tracked == 0


class NormAct(nn.BatchNorm2d):
    """With an activation behind it, and a call of F.batch_norm of its own."""

    def forward(self, input: Tensor, slope: float = 0.1) -> Tensor:
        self.num_batches_tracked.add_(1)
        tensors = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.leaky_relu(F.batch_norm(input, *tensors, self.training, 0.2, self.eps), slope)


class NormThenAct(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


class ByHand(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / input.std(0)


def assert_shared(world: World, alone: _BatchNorm, x: Tensor, size: int, use: str) -> None:
    """Outputs and running statistics are those of one worker, in micro-batches of 3 rows."""
    nets = [nn.Sequential(copy.deepcopy(alone)) for _ in range(size)]
    pieces = x.split(3)
    each = len(pieces) // size
    wanted = torch.cat([alone(piece) for piece in (pieces if use == "micro" else [x])])

    def body(group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        net = nets[group.rank]
        if use == "micro":
            use_microbatch_norm(net)
        else:
            use_global_batchnorm(net, group)
        own = pieces[group.rank * each : (group.rank + 1) * each]
        out = torch.cat([net(piece).detach() for piece in own])
        update_running_statistics(net, group)
        return out, dict(net[0].named_buffers())

    got = world(size, body)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([out for out, _ in got]), wanted.detach(), **close)
    for _, buffers in got:
        torch.testing.assert_close(buffers, dict(alone.named_buffers()), **close)


@pytest.mark.parametrize(
    ("kind", "shape"), [(NormAct, (CHANNELS, 3, 2)), (NormThenAct, (CHANNELS,))], ids=str
)
@pytest.mark.parametrize("use", ["global", "micro"])
def test_a_subclass_keeps_its_forward_and_shares_statistics(
    world: World, kind: type[_BatchNorm], shape: tuple[int, ...], use: str
) -> None:
    assert_shared(world, layer_of(kind), numbers(6, *shape), 2, use)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_noted_microbatches_settle_in_the_order_of_the_batch(
    world: World, size: int, momentum: float | None
) -> None:
    """At any number of ranks the running statistics are those of 4 micro-batches in turn."""
    alone = layer_of(nn.BatchNorm1d, momentum=momentum)
    assert_shared(world, alone, numbers(12, CHANNELS), size, "micro")


def test_a_subclass_that_takes_statistics_by_itself_is_refused() -> None:
    net = nn.Sequential(ByHand(CHANNELS))
    use_global_batchnorm(net, solo_group())
    with pytest.raises(BadInput, match="ByHand computes the statistics"):
        net(numbers(3, CHANNELS))
    net.eval()
    net(numbers(3, CHANNELS))


def test_hooks_of_a_layer_that_is_replaced_stay() -> None:
    net = Net()
    seen: list[str] = []
    net.norm.register_forward_hook(lambda *_: seen.append("forward"))
    net.norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    pre = net.norm.register_forward_pre_hook(lambda *_: seen.append("pre"))
    use_global_batchnorm(net, solo_group())
    x = numbers(3, 4, dtype=torch.float32).requires_grad_()
    net.norm(x).sum().backward()
    assert seen == ["pre", "forward", "backward"]
    pre.remove()
    net.norm(x)
    assert seen[3:] == ["forward"]


def test_noted_rows_that_stand_in_leave_no_trace() -> None:
    net = nn.Sequential(layer_of(nn.BatchNorm2d))
    forward_state = use_microbatch_norm(net)
    forward_state.rows_are_real = False
    net(numbers(1, CHANNELS, 2, 2))
    update_running_statistics(net, solo_group())
    assert net[0].num_batches_tracked == 0
    assert not net[0].running_mean.any()


def test_a_batchnorm_with_a_forward_of_its_own_keeps_it_in_the_copy() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), NormAct(4))
    use_global_batchnorm(model, solo_group())
    twin = copy_structure(model)
    x = torch.ones(2, 1, 3, 3)
    expected = twin.eval()(x)
    norm = model[1]
    for name, tensor in norm.named_parameters():
        setattr(norm, name, nn.Parameter(tensor[:2]))
    for name, tensor in norm.named_buffers():
        setattr(norm, name, tensor if tensor.dim() == 0 else tensor[:2])
    torch.testing.assert_close(twin(x), expected)
