"""Before the first step: a model that is split by tp or ep computes what the model does.

The model as it was built, with full tensors, and the split one run on the first micro-batch,
without dropout. Outputs and gradients of all parameters are compared, and what differs is refused:

    tp   the model; of a large one, one block of each kind. Also outputs of every layer behind
         which ranks add up: what was found by names and shapes was a guess until then
    ep   a mixture of each kind, with the tokens that it got, so that the same experts are chosen;
         then the outputs of the model. A sentence tells where routing is another one on several
         workers by itself: where it draws random numbers, or looks at other rows

For the stages of a pipeline see `stage_check.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.group import Op
from shoal.errors import BadInput, ShoalError
from shoal.replica.deferred_init import full_name
from shoal.replica.expert.split import ExpertSplit
from shoal.replica.microbatch_context import (
    ModuleCall,
    Quiet,
    evaluate_leaves,
    fork_rng,
    preserve_modes,
    seed_generators,
)
from shoal.replica.split.comparison import Computed, gradients_of, is_close, is_same, noise_of
from shoal.replica.split.sharded_tensor import full_activations
from shoal.replica.tensor.linear import ColumnLinear, RowLinear
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.runtime.pytree import Tree, map_tensors, tensors_of

Run = Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]]
_SAME = 0.99  # of the outputs: rounding may send a token to another expert


def _tell_what_differs(split: SplitModel, run: Run, call: Tree, outputs: list[Tensor]) -> None:
    """`run` computes the whole model on this worker, and `outputs` is what it makes of `call`."""
    experts = split.experts
    assert experts is not None
    label = f"ep({experts.group.size})"
    if _depends_on_other_rows(run, call, outputs):
        split.say(
            f"{label}: what {type(experts.model).__name__} returns for a row depends on other rows "
            "of the batch (such as a capacity over all tokens), and each worker has its own rows, "
            "as under ddp: the result is not that of one device"
        )
    drawing = _drawing_modules(experts, run, call)
    if drawing:
        split.say(
            f"{label}: {drawing[0]} draws random numbers while it routes tokens, and each worker "
            "draws its own, as with dropout: the result is not that of one device"
        )


def _depends_on_other_rows(run: Run, call: Tree, outputs: list[Tensor]) -> bool:
    """All ranks run the model once more, whatever rows they have: it may exchange something."""
    rows = {len(t) for t in tensors_of(call) if t.dim()}
    count = rows.pop() if len(rows) == 1 else 0
    half = (count + 1) // 2
    some = run(*(map_tensors(lambda t: t[:half] if t.dim() else t, call) if count > 1 else call))
    if count < 2:
        return False
    pairs = zip(outputs, some, strict=False)
    return not all(
        is_close(a[:half], b, share=_SAME)
        for a, b in pairs
        if a.dim() and b.dim() and len(a) == count and len(b) == half
    )


def _drawing_modules(experts: ExpertSplit, run: Run, call: Tree) -> list[str]:
    """The blocks that choose experts and draw random numbers in training, besides dropout."""
    drew: dict[str, bool] = {}
    mode = _RandomOperations()  # type: ignore[no-untyped-call]

    def begin(*_: Any) -> None:
        mode.found = False

    def end(name: str, *_: Any) -> None:
        drew[name] = mode.found

    with ExitStack() as hooks, preserve_modes(experts.original):
        for name in sorted({experts.router_block(name) for name in experts.kinds}):
            module = experts.original.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(partial(end, name)).remove)
        experts.original.train()
        for module in experts.original.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                module.eval()
        with mode:
            run(*call)
    return [name or type(experts.model).__name__ for name, found in drew.items() if found]


class _RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation draws random numbers."""

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found = True
        return func(*args, **(kwargs or {}))


LARGEST_COMPARED_BYTES = 1 << 30  # of the parameters; above, blocks or mixtures alone are compared
_MOST = 0.9  # of the outputs of a model: rounding may send a token to another expert


class SplitModel(NamedTuple):
    """A model of whose tensors, or experts, this worker has some."""

    tensor: TensorSplit | None
    experts: ExpertSplit | None
    with_gradients: bool  # whether these are compared, too
    say: Callable[[str], None]

    @property
    def outer(self) -> TensorSplit | ExpertSplit:
        """What was split first, and so has the model as it was built."""
        found = self.experts or self.tensor
        assert found is not None
        return found

    def full(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Complete tensors by name; all ranks call it."""
        if self.experts is not None:
            tensors = self.experts.complete(tensors)
        return tensors if self.tensor is None else self.tensor.gather_full(tensors)

    def part(self, name: str, full: Tensor) -> Tensor:
        """What this rank has of a parameter, or of its gradient."""
        if self.experts is not None:
            full = self.experts.take_shard({name: full})[name]
        return full if self.tensor is None else self.tensor.shard_of(name, full)

    def agree(self, flags: list[bool]) -> list[bool]:
        """What all ranks say yes to."""
        answers = torch.tensor([float(flag) for flag in flags], device=self.outer.device)
        for split in (self.experts, self.tensor):
            if split is not None:
                split.group.all_reduce(answers, Op.MIN).wait()
        return [answer > 0 for answer in answers.tolist()]

    def gradient_here(self, name: str, gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
        """What this rank should have got: of experts here that of all tokens. All ranks call it."""
        experts = self.experts
        if experts is None or not experts.is_of_expert(name):
            return None if gradient is None else self.part(name, gradient)
        total = torch.zeros_like(leaf) if gradient is None else gradient.contiguous().clone()
        experts.group.all_reduce(total).wait()
        return self.part(name, total) if experts.is_here(name) else None

    def sums_in(self, name: str) -> list[str]:
        """The layers of a module behind which the ranks of tp add up, by their names in it."""
        if self.experts is not None or self.tensor is None:
            return []
        return [n[len(name) + 1 :] if name else n for n in self.tensor.sums_in(name)]

    def refusal(self, block: str, where: str, what: str) -> BadInput:
        label = f"{type(self.outer.model).__name__}"
        if self.experts is not None:
            of = f" (the gradient of {where})" if where else ""
            return BadInput(
                f"ep({self.experts.group.size}) cannot train {label}: with its experts on "
                f"different workers {block or 'it'} {what}{of}; omit ep, or name the experts that "
                'it may spread, as in ep(n, experts=["blocks.*.mlps"])'
            )
        name = ".".join(part for part in (block, where) if part)
        parent = name.rpartition(".")[0] or name
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", parent)
        place = f"{name} and the layers around it are split" if name else "its layers are split"
        return BadInput(
            f"tp({self.outer.group.size}) cannot train {label}: where {place}, it {what}; keep "
            f'what is special about it whole, as in plan={{"{pattern}": "whole"}}'
        )

    @contextmanager
    def refusing(self, block: str, where: Callable[[], str] = str) -> Iterator[None]:
        """Whatever a forward raises, with other layers than it was built for, is a refusal."""
        try:
            yield
        except (ShoalError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"fails with {type(error).__name__}: {error}"
            raise self.refusal(block, where(), what) from error


def check_split(split: SplitModel, call: ModuleCall) -> None:
    """Raise `BadInput` on all ranks unless the split model computes what the model does."""
    if split.experts is not None:
        with _repeatable(split, nn.Module.eval):
            _check_experts(split, split.experts, call)
        return
    for quiet in (nn.Module.eval, evaluate_leaves):
        try:
            with _repeatable(split, quiet):
                _check_layers(split, call)
            return
        except _FailsInEvaluation:
            pass


class _FailsInEvaluation(Exception):
    """The model itself does, such as one that returns losses in training alone."""


@contextmanager
def _repeatable(split: SplitModel, quiet: Quiet) -> Iterator[None]:
    outer = split.outer
    with fork_rng(outer.device), preserve_modes(outer.model), preserve_modes(outer.original):
        quiet(outer.model)
        quiet(outer.original)
        yield


def _check_layers(split: SplitModel, call: ModuleCall) -> None:
    assert split.tensor is not None
    calls = {"": call}
    if split.tensor.full_bytes() > LARGEST_COMPARED_BYTES:
        _, calls = _noted_calls(split, split.tensor.typical_blocks(), call)
    for name, inner in calls.items():
        _compare(split, name, inner)


def _check_experts(split: SplitModel, experts: ExpertSplit, call: ModuleCall) -> None:
    outputs, calls = _noted_calls(split, experts.kinds, call)
    was_called = split.agree([name in calls for name in experts.kinds])
    for name, called in zip(experts.kinds, was_called, strict=True):
        if called:
            _compare(split, name, calls[name])
    config = getattr(experts.model, "config", None)
    name = "output_router_logits"  # of all workers: the model returns a loss over them
    has_shared_loss = call.kwargs.get(name, False) or getattr(config, name, False)
    if experts.full_bytes <= LARGEST_COMPARED_BYTES and not has_shared_loss:
        _compare_outputs(split, call, outputs)


@torch.no_grad()
def _noted_calls(
    split: SplitModel, names: Sequence[str], call: ModuleCall
) -> tuple[list[Tensor], dict[str, ModuleCall]]:
    """Outputs of the split model, and how it calls modules of these names first."""
    calls: dict[str, ModuleCall] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = map_tensors(lambda t: t.detach().clone(), full_activations((args, kwargs)))
        calls.setdefault(name, ModuleCall(given[0], given[1], call.seed))

    model = split.outer.model
    with ExitStack() as hooks, split.refusing(""):
        for name in names:
            hook = partial(note, name)
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        seed_generators(split.outer.device, call.seed)
        out = model(*call.args, **call.kwargs)
    return [t.detach() for t in tensors_of(full_activations(out))], calls


# ------------------------------------------------------------------ a module, whole and split


def _compare(split: SplitModel, name: str, call: ModuleCall) -> None:
    part = split.outer.model.get_submodule(name)
    whole = split.outer.original.get_submodule(name)
    run = partial(_run, split, call, split.sums_in(name))
    tensors, leaves = _whole_tensors(split, name)
    try:
        expected, expected_sums = run(tensors, whole, [])
    except Exception as error:  # whatever a forward does in evaluation mode
        is_tried_again = split.experts is None and not whole.training
        if isinstance(error, (ShoalError, torch.OutOfMemoryError)) or not is_tried_again:
            raise
        raise _FailsInEvaluation from error
    order: list[str] = []
    with split.refusing(name, lambda: _stuck(part, order, expected_sums)):
        actual, actual_sums = run(_copied_parameters(part), part, order)
    same = {
        key: is_close(t, actual_sums[key]) for key, t in expected_sums.items() if key in actual_sums
    }
    # of a block of layers the first output: others may be those of some heads
    same[""] = expected.has_outputs(actual.outputs, first=bool(name) and split.experts is None)
    noise = noise_of(expected.gradients)
    for key, wanted in expected.gradients.items():
        if key in leaves:
            wanted = split.gradient_here(full_name(name, key), wanted, leaves[key])
        same[key] = is_same(wanted, actual.gradients.get(key), noise)
    for key, agreed in zip(same, split.agree(list(same.values())), strict=True):
        if not agreed:
            raise split.refusal(name, key, "does not compute what the model does")


def _whole_tensors(split: SplitModel, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of a module of the model as it was built, in full; the parameters of those."""
    part = split.outer.model.get_submodule(name)
    trained = dict(part.named_parameters())
    named: dict[str, Tensor] = {**trained, **dict(part.named_buffers())}
    full = split.full({full_name(name, n): t.detach() for n, t in named.items()})
    tensors = {n: full[full_name(name, n)].clone() for n in named}
    leaves = {n: tensors[n].requires_grad_(p.requires_grad) for n, p in trained.items()}
    return tensors, leaves


def _copied_parameters(part: nn.Module) -> dict[str, Tensor]:
    """Whose gradients no one else sees; tied ones stay tied."""
    copies: dict[int, Tensor] = {}
    return {
        name: copies.setdefault(id(p), p.detach().clone().requires_grad_(p.requires_grad))
        for name, p in part.named_parameters(remove_duplicate=False)
        if not p.is_meta
    }


def _run(
    split: SplitModel,
    call: ModuleCall,
    sums: list[str],
    tensors: dict[str, Tensor],
    module: nn.Module,
    order: list[str],
) -> tuple[Computed, dict[str, Tensor]]:
    """One forward with `tensors`, and one backward from a combination of all outputs.

    What `module` computes, and the outputs of layers `sums` inside of it. The linear
    layers of a split model go to `order` as they run. Of experts the gradients of inputs are
    compared, too.
    """
    noted: dict[str, Tensor] = {}

    def note(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        order.append(name)
        found = tensors_of(full_activations(output))[:1] if name in sums else []
        if found:
            noted.setdefault(name, found[0].detach())

    given = (call.args, call.kwargs)
    inputs: dict[str, Tensor] = {}
    if split.experts is not None:
        given = map_tensors(
            lambda t: t.detach().requires_grad_(split.with_gradients and t.is_floating_point()),
            given,
        )
        wanted = [t for t in tensors_of(given) if t.requires_grad]
        inputs = {f"input {i}": t for i, t in enumerate(wanted)}
    linear = [n for n, m in module.named_modules() if isinstance(m, ColumnLinear | RowLinear)]
    seed_generators(split.outer.device, call.seed)
    with ExitStack() as hooks, torch.set_grad_enabled(split.with_gradients):
        hooks.enter_context(_reparametrize_module(module, tensors, tie_weights=True))
        for name in {*sums, *linear}:
            layer = module.get_submodule(name)
            hooks.callback(layer.register_forward_hook(partial(note, name)).remove)
        # a forward may change its inputs in place
        args, kwargs = map_tensors(lambda t: t + 0 if t.requires_grad else t.clone(), given)
        outputs = tensors_of(full_activations(module(*args, **kwargs)))
        leaves = {n: p for n, p in tensors.items() if p.requires_grad} | inputs
        gradients = gradients_of(outputs, leaves) if split.with_gradients else {}
    return Computed([t.detach() for t in outputs], gradients), noted


def _stuck(part: nn.Module, order: list[str], sums: dict[str, Tensor]) -> str:
    """Where the split module failed: a column layer whose row layer was not reached, or a sum."""
    for name in reversed(order):
        layer = part.get_submodule(name)
        if isinstance(layer, ColumnLinear | RowLinear):
            if isinstance(layer, ColumnLinear) and layer.output == "sharded":
                return name
            break
    return next((name for name in sums if name not in order), "")


# ------------------------------------------------------------------ a model with experts


@torch.no_grad()
def _compare_outputs(split: SplitModel, call: ModuleCall, outputs: list[Tensor]) -> None:
    tensors, _ = _whole_tensors(split, "")
    whole = split.outer.original

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        seed_generators(split.outer.device, call.seed)
        copied: Tree = map_tensors(lambda t: t.clone(), (args, kwargs))
        return tensors_of(full_activations(functional_call(whole, tensors, *copied)))

    expected = run(call.args, call.kwargs)
    pairs = list(zip(expected, outputs, strict=False))
    same = len(expected) == len(outputs) and all(is_close(a, b, share=_MOST) for a, b in pairs)
    if not split.agree([same])[0]:
        raise split.refusal("", "", "does not compute what the model does")
    _tell_what_differs(split, run, (call.args, call.kwargs), expected)
