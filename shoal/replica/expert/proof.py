"""Proof before the first step: spread experts compute what they do on one worker.

Every kind of mixture gets the tokens of the first micro-batch of each worker twice: whole, and
with its experts spread. Outputs and gradients are compared. Both see the same tokens, so that they
choose the same experts. Then the outputs of the model are, up to `LARGEST_PROVEN_BYTES`. What
differs is refused. A sentence tells where routing is another one on several workers by itself:
where it draws random numbers, or looks at other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.comm.group import Op
from shoal.errors import BadInput, ShoalError
from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.comparison import gradients_of, is_close
from shoal.replica.expert.routing import tell_what_differs
from shoal.replica.expert.split import ExpertSplit
from shoal.replica.microbatch import fork_rng, preserve_modes, seed_generators
from shoal.replica.tensor.activations.sharded_tensor import full_tensors
from shoal.replica.tensor.parallelize import TensorSplit

LARGEST_PROVEN_BYTES = 1 << 30  # of the parameters; above, the mixtures alone are compared
_MOST = 0.9  # of the outputs of a model: rounding may send a token to another expert
_NOISE = 1e-5  # of the largest gradient: what rounding leaves where the gradient is 0


class RoutedCall(NamedTuple):
    """How a module is called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int


class SpreadModel(NamedTuple):
    """A model whose experts are spread, and its layers perhaps split."""

    experts: ExpertSplit
    tensor: TensorSplit | None

    def full(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Complete tensors by name; all ranks call it."""
        gathered = self.experts.complete(tensors)
        return gathered if self.tensor is None else self.tensor.gather_full(gathered)

    def part(self, name: str, full: Tensor) -> Tensor:
        """What this rank has of a parameter, or of its gradient."""
        own = self.experts.take_shard({name: full})[name]
        return own if self.tensor is None else self.tensor.shard_of(name, own)

    def agree(self, flags: list[bool]) -> list[bool]:
        """What all ranks say yes to."""
        answers = torch.tensor([float(flag) for flag in flags], device=self.experts.device)
        self.experts.group.all_reduce(answers, Op.MIN).wait()
        if self.tensor is not None:
            self.tensor.group.all_reduce(answers, Op.MIN).wait()
        return [answer > 0 for answer in answers.tolist()]


def prove_experts(
    spread: SpreadModel, call: RoutedCall, with_gradients: bool, say: Callable[[str], None]
) -> None:
    """Raise `BadInput` on all ranks unless the model computes what it does on one worker."""
    experts = spread.experts
    with fork_rng(experts.device), preserve_modes(experts.model), preserve_modes(experts.original):
        experts.model.eval()
        experts.original.eval()
        calls: dict[str, RoutedCall] = {}
        outputs = _run_noting(spread, call, calls)
        names = list(experts.kinds)
        was_called = spread.agree([name in calls for name in names])
        for name, called in zip(names, was_called, strict=True):
            if called:
                _compare(spread, name, calls[name], with_gradients)
        if experts.full_bytes <= LARGEST_PROVEN_BYTES and not _has_shared_loss(experts, call):
            _compare_outputs(spread, call, outputs, say)


@torch.no_grad()
def _run_noting(
    spread: SpreadModel, call: RoutedCall, calls: dict[str, RoutedCall]
) -> list[Tensor]:
    """Outputs of the model; `calls` gets those of its mixtures, one of each kind."""

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = map_tensors(lambda t: t.detach().clone(), full_tensors((args, kwargs)))
            calls.setdefault(name, RoutedCall(given[0], given[1], call.seed))

        return hook

    modules = dict(spread.experts.model.named_modules())
    hooks = [
        modules[name].register_forward_pre_hook(note(name), with_kwargs=True)
        for name in spread.experts.kinds
    ]
    try:
        seed_generators(spread.experts.device, call.seed)
        out = spread.experts.model(*call.args, **call.kwargs)
    except (ShoalError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a forward does with other experts than it was built for
        raise _refusal(spread, "", f"fails with {type(error).__name__}: {error}") from error
    finally:
        for handle in hooks:
            handle.remove()
    return [t.detach() for t in tensors_of(full_tensors(out))]


def whole_function(spread: SpreadModel, name: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """A module of the model as it was built, with all experts here; its parameters by name."""
    prefix = f"{name}." if name else ""
    part = spread.experts.model.get_submodule(name)
    whole = spread.experts.original.get_submodule(name)
    trained = dict(part.named_parameters())
    named: dict[str, Tensor] = {**trained, **dict(part.named_buffers())}
    full = spread.full({prefix + n: t.detach() for n, t in named.items()})
    tensors = {n: full[prefix + n].clone() for n in named}
    leaves = {n: tensors[n].requires_grad_(p.requires_grad) for n, p in trained.items()}
    return lambda *args, **kwargs: functional_call(whole, tensors, args, kwargs), leaves


# ------------------------------------------------------------------ mixtures


class _Computed(NamedTuple):
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


def _compare(spread: SpreadModel, name: str, call: RoutedCall, with_gradients: bool) -> None:
    part = spread.experts.model.get_submodule(name)
    function, leaves = whole_function(spread, name)
    expected = _compute(spread, function, leaves, call, with_gradients)
    local: dict[str, Tensor] = dict(part.named_parameters())
    try:
        actual = _compute(spread, part, local, call, with_gradients)
    except (ShoalError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the same
        raise _refusal(spread, name, f"fails with {type(error).__name__}: {error}") from error
    _check(spread, name, expected, actual, leaves)


def _compute(
    spread: SpreadModel,
    function: Callable[..., Any],
    parameters: dict[str, Tensor],
    call: RoutedCall,
    with_gradients: bool,
) -> _Computed:
    def leaf(tensor: Tensor) -> Tensor:
        needs_grad = with_gradients and tensor.is_floating_point()
        return tensor.detach().clone().requires_grad_(needs_grad)

    args, kwargs = map_tensors(leaf, (call.args, call.kwargs))
    inputs = {f"input {i}": t for i, t in enumerate(tensors_of((args, kwargs)))}
    seed_generators(spread.experts.device, call.seed)
    with torch.set_grad_enabled(with_gradients):
        # a forward may change its inputs in place
        given = map_tensors(lambda t: t + 0 if t.requires_grad else t, (args, kwargs))
        outputs = tensors_of(full_tensors(function(*given[0], **given[1])))
    held = {n: p for n, p in parameters.items() if p.device.type != "meta"}
    gradients = gradients_of(outputs, {**held, **inputs}) if with_gradients else {}
    return _Computed([t.detach() for t in outputs], gradients)


def _check(
    spread: SpreadModel,
    name: str,
    expected: _Computed,
    actual: _Computed,
    leaves: dict[str, Tensor],
) -> None:
    """The first difference that any rank finds is named on all of them."""
    shapes = [t.shape for t in expected.outputs] == [t.shape for t in actual.outputs]
    pairs = zip(expected.outputs, actual.outputs, strict=False)
    found = {"": shapes and all(is_close(a, b) for a, b in pairs)}
    largest = max((float(g.abs().max()) for g in expected.gradients.values()
                   if g is not None and g.numel()), default=0.0)  # fmt: skip
    for key, gradient in expected.gradients.items():
        full_name = f"{name}.{key}" if name else key
        if gradient is None and spread.experts.is_of_expert(full_name):
            gradient = torch.zeros_like(leaves[key])
        wanted = None if gradient is None else _own_gradient(spread, full_name, gradient)
        got = actual.gradients.get(key)
        found[key] = _same(wanted, got, _NOISE * largest)
    for key, ok in zip(found, spread.agree(list(found.values())), strict=True):
        if not ok:
            what = f"the gradient of {key}" if key else "what it returns"
            raise _refusal(spread, name, f"computes other numbers ({what})")


def _own_gradient(spread: SpreadModel, name: str, gradient: Tensor) -> Tensor | None:
    """What this rank should have got: of experts here that of all tokens, else that of its own."""
    experts = spread.experts
    if not experts.is_of_expert(name):
        return spread.part(name, gradient)
    total = gradient.contiguous().clone()
    experts.group.all_reduce(total).wait()
    return spread.part(name, total) if experts.is_here(name) else None


def _same(wanted: Tensor | None, got: Tensor | None, noise: float) -> bool:
    if wanted is None or got is None:
        present = wanted if wanted is not None else got
        return present is None or float(present.abs().sum()) <= noise
    return is_close(wanted, got, noise)


# ------------------------------------------------------------------ the model


@torch.no_grad()
def _compare_outputs(
    spread: SpreadModel, call: RoutedCall, outputs: list[Tensor], say: Callable[[str], None]
) -> None:
    function, _ = whole_function(spread, "")

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        seed_generators(spread.experts.device, call.seed)
        copied: Tree = map_tensors(lambda t: t.clone(), (args, kwargs))
        return tensors_of(full_tensors(function(*copied[0], **copied[1])))

    expected = run(call.args, call.kwargs)
    pairs = list(zip(expected, outputs, strict=False))
    same = len(expected) == len(outputs) and all(is_close(a, b, share=_MOST) for a, b in pairs)
    if not spread.agree([same])[0]:
        raise _refusal(spread, "", "computes other numbers (what it returns)")
    tell_what_differs(spread.experts, run, (call.args, call.kwargs), expected, say)


def _has_shared_loss(experts: ExpertSplit, call: RoutedCall) -> bool:
    """Whether the model returns a loss over the router logits of all workers."""
    config = getattr(experts.model, "config", None)
    name = "output_router_logits"
    return bool(call.kwargs.get(name, False) or getattr(config, name, False))


def _refusal(spread: SpreadModel, name: str, what: str) -> BadInput:
    experts = spread.experts
    place = f"{name} " if name else "it "
    return BadInput(
        f"ep({experts.group.size}) cannot train {type(experts.model).__name__}: with its experts "
        f"on different workers {place}{what}; omit ep, or name the experts that it may spread, as "
        'in ep(n, experts=["blocks.*.mlps"])'
    )
