"""Collectives inside of a forward: torch.compile keeps each as one operation of its graph.

Workers with the same layers get the same graph, so they call their collectives in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group, group_by_number


def collective(verb: str, group: Group, *tensors: Tensor) -> None:
    """`group.verb(*tensors)`; the first one is changed in place."""
    if torch.compiler.is_compiling():
        getattr(torch.ops.shoal, verb)(*tensors, group.number)
    else:
        getattr(group, verb)(*tensors).wait()


_library: Any = torch.library.Library("shoal", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _tensors in (
    ("all_reduce", "Tensor(a!) data"),
    ("all_gather", "Tensor(a!) out, Tensor data"),
    ("reduce_scatter", "Tensor(a!) out, Tensor data"),
):

    def _run(*given: Any, verb: str = _name) -> None:
        *tensors, number = given
        getattr(group_by_number(number), verb)(*tensors).wait()

    _library.define(f"{_name}({_tensors}, int group) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    _library.impl(_name, lambda *given: None, "Meta")
