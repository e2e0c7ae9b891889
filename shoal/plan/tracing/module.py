"""The workload of any nn.Module, traced on fake tensors: no memory is taken and nothing computed.

A dispatch mode sees every operation of forward and backward. Hooks on modules say which layer
computes; backward finds its layer by the sequence number of the autograd node that runs, which
lies between those that forward had when it entered and left the layer. A product of backward is
of the weight where it does not read a parameter and its node leads to one.

Which modules of a model are its layers: where a pipeline may be cut.

A layer is an element of an outermost nn.Sequential or nn.ModuleList (a block), or a module beside
them. A module is opened where it holds such a stack and is not itself an element of one; an
element is opened where most of its parameters are in a stack of its own (a stage of a Swin
transformer), unless that holds experts, which run side by side.

    GPT          tokens  positions  dropout  blocks.0  blocks.1 …  norm  head
    ResNet       conv1  bn1  relu  maxpool  layer1.0  layer1.1  layer2.0 …  avgpool  fc
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

from shoal.errors import BadInput
from shoal.plan.tracing.recorder import Recorded, RecordedLayer, Splits, TraceRecorder
from shoal.plan.workloads import Precision
from shoal.plan.workloads.traced_workload import Line, TracedLayer, TracedWorkload, group_equal
from shoal.runtime.pytree import Tree, map_tensors, tensors_of

_MOSTLY = 0.5


def _layers(name: str, module: nn.Module, is_element: bool) -> Iterator[str]:
    """Names of the layers, as `named_modules` has them; "" is the model itself."""
    children = list(module.named_children())
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        for child_name, child in children:
            yield from _layers(f"{name}.{child_name}".strip("."), child, True)
    elif children and _is_opened(name, module, is_element):
        for child_name, child in children:
            yield from _layers(f"{name}.{child_name}".strip("."), child, False)
    else:
        yield name


def _is_opened(name: str, module: nn.Module, is_element: bool) -> bool:
    if not name:
        return True
    stacks = [  # of several modules that are no leaves, one after the other
        one
        for place, one in module.named_modules()
        if isinstance(one, nn.Sequential | nn.ModuleList)
        and "expert" not in place
        and sum(1 for child in one if next(child.children(), None) is not None) > 1
    ]
    if not is_element:
        return bool(stacks)
    largest = max((_numbers(stack) for stack in stacks), default=0)
    return largest > _MOSTLY * _numbers(module)


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


LossOf = Callable[[Tree], Tensor]  # runs the model on a batch
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def trace_module(
    model: nn.Module,
    loss_of: LossOf,
    batches: Mapping[int, Tree],
    precision: Precision | None = None,
    roles: Mapping[str, str] | None = None,
    experts: Mapping[str, frozenset[str]] | None = None,
) -> TracedWorkload:
    """Trace a step of two batches, given by their numbers of samples.

    `loss_of` calls the model, whose parameters are fake meanwhile, on one of the batches.
    `roles` are those of modules under tp, by name; `experts` are names of modules that send tokens
    to experts, each with the names of the experts' parameters.
    """
    chosen = precision or precision_of(model)
    small, large = (
        _trace(model, loss_of, batches[rows], chosen.compute, Splits(roles or {}, experts or {}))
        for rows in sorted(batches)
    )
    rows = (min(batches), max(batches))
    layers = tuple(_merge(one, small, large, rows) for one in large.layers)
    name = type(model).__name__
    return TracedWorkload(name, chosen, rows, group_equal(layers), held=large.tensors)


def workload_of(
    model: nn.Module,
    inputs: Tree,
    loss: Callable[[Any], Tensor] | None = None,
    roles: Mapping[str, str] | None = None,
) -> TracedWorkload:
    """Of a model and one batch of inputs, whose tensors have a row for each sample.

    A tuple is spread over positional arguments, a dict over named ones. Without a loss, the sum of
    the outputs stands for it.
    """
    rows = {len(t) for t in tensors_of(inputs) if t.dim()}
    if len(rows) != 1:
        raise BadInput(f"the tensors of a batch have different numbers of samples: {sorted(rows)}")
    count = rows.pop()
    other = max(1, count // 2) if count > 1 else 2
    batches = {n: map_tensors(partial(_resized, rows=n), inputs) for n in (count, other)}

    def loss_of(batch: Tree) -> Tensor:
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
        output = model(*(args if isinstance(args, tuple | list) else (args,)), **kwargs)
        return loss(output) if loss is not None else sum_of(output)

    return trace_module(model, loss_of, batches, roles=roles)


def _resized(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]), device="meta") if tensor.dim() else tensor


def sum_of(output: Tree) -> Tensor:
    floats = [t for t in tensors_of(output) if t.is_floating_point()]
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return torch.stack([t.float().sum() for t in floats]).sum()


def precision_of(model: nn.Module, state_bytes: int = 8) -> Precision:
    """As the parameters are; the optimizer is Adam unless its bytes a parameter say otherwise."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if first is None else first.dtype
    width = dtype.itemsize
    return Precision(_NAMES.get(dtype, "fp32"), width, width, 0, state_bytes)


def _trace(
    model: nn.Module, loss_of: LossOf, batch: Tree, compute: str, splits: Splits
) -> Recorded:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)  # recurrent layers are then products that a trace sees
        _, content = stack.enter_context(on_fake_tensors(model, batch))
        recorder = TraceRecorder(model, tuple(_layers("", model, False)) or ("",), splits)
        stack.enter_context(recorder.watching())
        with _autocast(compute, tensors):
            loss = loss_of(content)
        if loss.requires_grad:
            recorder.begin_backward()
            loss.backward()  # type: ignore[no-untyped-call]
        return recorder.recorded()


@contextmanager
def on_fake_tensors(model: nn.Module, tree: Tree) -> Iterator[tuple[Sequence[Tensor], Tree]]:
    """In the block the tensors of the model are fake; yields them, and the tree with fake ones."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    tensors = [*model.named_parameters(), *model.named_buffers()]
    with FakeTensorMode(allow_non_fake_inputs=True):
        own = {name: fake(t).requires_grad_(t.requires_grad) for name, t in tensors}
        content = map_tensors(fake, tree)
        with _reparametrize_module(model, own, tie_weights=True):
            yield list(own.values()), content


class _GpuAutocast(TorchFunctionMode):
    """What autocast runs on a GPU, where that of a CPU, which the trace is on, runs another thing.

    cross_entropy takes logarithms in 16 bits and a copy of them in fp32; softmax and powers are
    fp32; a mask of dropout has a byte.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = kwargs or {}
        if name == "cross_entropy":
            return _cross_entropy(*args, **given)
        if name == "dropout" and func is F.dropout:
            return _dropout(*args, **given)
        if name in _WIDE:
            args = map_tensors(_widened, tuple(args))
        return func(*args, **given)


_WIDE = ("softmax", "log_softmax", "logsumexp", "exp", "log", "pow", "rsqrt", "cumsum", "sum")


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in AUTOCAST.values() else tensor


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    if args or options.get("label_smoothing") or target.is_floating_point():
        return F.cross_entropy(input, target, *args, **options)
    chosen = {key: value for key, value in options.items() if key in ("weight", "ignore_index")}
    with torch.autocast("cpu", enabled=False):
        logarithms = input.log_softmax(min(1, input.dim() - 1))
        reduction = options.get("reduction", "mean")
        return F.nll_loss(logarithms.float(), target, reduction=reduction, **chosen)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0]


@contextmanager
def _autocast(compute: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """On where products are narrower than the parameters."""
    dtype = AUTOCAST.get(compute)
    if dtype is None or all(t.dtype != torch.float32 for _, t in tensors):
        yield
        return
    with torch.autocast("cpu", dtype=dtype), _GpuAutocast():
        yield


_LINES = (
    *("flops", "activations", "divided_activations", "passing"),
    *("input_bytes", "output_bytes"),
)
_NUMBERS = ("parameters", "divided_parameters", "expert_parameters", "shared_parameters")


def _merge(name: str, small: Recorded, large: Recorded, rows: tuple[int, int]) -> TracedLayer:
    """One layer of both traces; what only one of them has grows in proportion to the batch."""
    one = small.layers.get(name)
    other = large.layers[name]
    names = [kernel.large.name for kernel in other.kernels]
    if one is None or [kernel.large.name for kernel in one.kernels] != names:
        one = _scaled(other, rows[0] / rows[1])
    sizes: dict[str, Any] = {key: Line(one.sizes[key], other.sizes[key]) for key in _LINES}
    sizes |= {key: other.sizes[key] for key in _NUMBERS}
    return TracedLayer(
        name or "model",
        tuple(b._replace(small=a.small) for a, b in zip(one.kernels, other.kernels, strict=True)),
        tuple(
            b._replace(bytes=Line(a.bytes.small, b.bytes.large))
            for a, b in zip(one.messages, other.messages, strict=True)
        ),
        **sizes,
    )


def _scaled(layer: RecordedLayer, share: float) -> RecordedLayer:
    """As it would be if all of it grew with the batch."""
    kernels = []
    for traced in layer.kernels:
        kernel = traced.large
        rows = max(1, round(kernel.m * share)) if kernel.flops else 0
        shrunk = kernel._replace(flops=kernel.flops * share, bytes=kernel.bytes * share, m=rows)
        kernels.append(traced._replace(small=shrunk))
    messages = [
        one._replace(bytes=Line(one.bytes.large * share, one.bytes.large)) for one in layer.messages
    ]
    sizes = defaultdict(float, {key: size * share for key, size in layer.sizes.items()})
    return RecordedLayer(kernels, messages, sizes)
