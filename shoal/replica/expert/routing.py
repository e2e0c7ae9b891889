"""Tells where workers with rows of their own route tokens otherwise than one device does.

Random numbers   a router that adds noise or draws experts; each worker draws its own
other rows       a capacity over all tokens of a batch, statistics of a batch
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.expert.split import ExpertSplit
from shoal.replica.split.comparison import is_close

Run = Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]]
_SAME = 0.99  # of the outputs: rounding may send a token to another expert


def tell_what_differs(
    experts: ExpertSplit,
    run: Run,
    call: Tree,
    outputs: list[Tensor],
    say: Callable[[str], None],
) -> None:
    """`run` computes the whole model on this worker, and `outputs` is what it makes of `call`."""
    label = f"ep({experts.group.size})"
    if _depends_on_other_rows(run, call, outputs):
        say(
            f"{label}: what {type(experts.model).__name__} returns for a row depends on other rows "
            "of the batch (such as a capacity over all tokens), and each worker has its own rows, "
            "as under ddp: the result is not that of one device"
        )
    drawing = _drawing_modules(experts, run, call)
    if drawing:
        say(
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

    hooks = []
    for name in sorted({experts.router_block(name) for name in experts.kinds}):
        module = experts.original.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(begin))
        hooks.append(module.register_forward_hook(partial(end, name)))
    experts.original.train()
    for module in experts.original.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
            module.eval()
    try:
        with mode:
            run(*call)
    finally:
        experts.original.eval()
        for hook in hooks:
            hook.remove()
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
