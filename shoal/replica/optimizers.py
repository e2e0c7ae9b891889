"""What is known of optimizers: their learning rates, and what an update looks at."""

from __future__ import annotations

import torch

# what these do to one element depends on no other, so a worker or server may hold a slice
ELEMENTWISE = (
    *("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop"),
)


def ratios(optimizer: torch.optim.Optimizer) -> list[float]:
    """Each group's learning rate divided by the optimizer's; a schedule keeps these ratios."""
    base = optimizer.defaults.get("lr")
    if not base:
        return [1.0] * len(optimizer.param_groups)
    return [float(group["lr"]) / float(base) for group in optimizer.param_groups]


def is_known_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is of a class of torch whose update of an element depends on no other."""
    name = type(optimizer).__name__
    known = (*ELEMENTWISE, "SparseAdam")
    return name in known and type(optimizer) is getattr(torch.optim, name, None)
