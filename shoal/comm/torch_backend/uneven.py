"""Collectives of lists whose tensors may differ in size, which a `Group` has for one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.transport.transport import Work


def all_to_all_lists(group: Group, outputs: list[Tensor], inputs: list[Tensor]) -> Work:
    """`inputs[r]` goes to rank r, `outputs[r]` comes from it."""
    if _are_even(group, [*outputs, *inputs]):
        return group.all_to_all(outputs, inputs)
    out = torch.empty(sum(t.numel() for t in outputs), dtype=outputs[0].dtype)
    recv_counts = [t.numel() for t in outputs]
    send_counts = [t.numel() for t in inputs]
    data = torch.cat([t.detach().reshape(-1).cpu() for t in inputs])
    group.all_to_all_uneven(out, data, recv_counts, send_counts).wait()
    for tensor, received in zip(outputs, torch.split(out, recv_counts), strict=True):
        tensor.copy_(received.view(tensor.shape))
    return group.barrier()


def reduce_scatter_lists(group: Group, out: Tensor, inputs: list[Tensor], op: Op) -> Work:
    """`inputs[r]` of all ranks combined at rank r; uneven ones are reduced one by one."""
    if len({tensor.numel() for tensor in inputs}) == 1:
        return group.reduce_scatter(out, inputs, op)
    if len(inputs) != group.size or out.numel() != inputs[group.rank].numel():
        return group.reduce_scatter(out, inputs, op)  # says what is wrong
    with torch.no_grad():
        copies = [piece.clone(memory_format=torch.contiguous_format) for piece in inputs]
        for root, piece in enumerate(copies):
            group.reduce(piece, root, op).wait()
        out.copy_(copies[group.rank].view(out.shape))
    return group.barrier()


def _are_even(group: Group, tensors: list[Tensor]) -> bool:
    """Whether the tensors of all ranks have one size; a rank sees only its own."""
    sizes = [tensor.numel() for tensor in tensors]
    extremes = torch.tensor([max(sizes), -min(sizes)])
    group.all_reduce(extremes, Op.MAX).wait()
    return int(extremes.sum()) == 0
