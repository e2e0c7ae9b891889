"""One of two processes: a plan of ours beside DTensor's parallelize_module with the same plan.

`python -m tests.replica.dtensor RANK SIZE FOLDER`; it leaves what it found in FOLDER/RANK.json.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shoal.comm.group import Group
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.replica.tensor.planning.plan import plan_of
from shoal.strategy.split_terms import Tp
from tests.replica.beside_torch import main

PLAN = {"up": "column", "down": "row", "head": "column"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))
        return logits


def ours(group: Group, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    model = Model()
    cpu = torch.device("cpu")
    roles = plan_of(model, Tp(2, plan=PLAN))
    split = TensorSplit(model, roles, group, cpu, DeferredInit(model).fill_in_turn(model, cpu))
    out = model(x)
    (out * out).mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out * 1, {n: p.detach() for n, p in model.named_parameters()}, split.gather_full(grads)


def theirs(x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    styles = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(Model(), init_device_mesh("cpu", (2,)), styles)
    out = model(x)
    (out * out).mean().backward()
    pieces = {}
    grads = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        pieces[name] = p.detach().to_local()
        grads[name] = p.grad.full_tensor()
    return out, pieces, grads


def compare(group: Group) -> dict[str, float]:
    """The largest differences of an element: outputs, what this rank holds, gradients."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    found = {}
    for what, mine, other in zip(
        ("outputs", "slices", "gradients"), ours(group, x), theirs(x), strict=True
    ):
        if isinstance(mine, Tensor):
            mine = {"": mine}
            other = {"": other}
        assert isinstance(other, dict) and set(mine) == set(other)
        found[what] = max(float((mine[n] - other[n]).abs().max()) for n in mine)
    return found


if __name__ == "__main__":
    main(compare)
