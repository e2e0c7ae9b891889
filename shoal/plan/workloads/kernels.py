"""Kernels from their sizes: matrix products, and what is bound by memory."""

from __future__ import annotations

from shoal.plan.workloads.workload import Kernel


def product(name: str, m: float, n: float, k: float, width: int, batch: float = 1) -> Kernel:
    """A matrix product [m, k] x [k, n], `batch` times."""
    rows, columns, inner, times = (max(1, round(size)) for size in (m, n, k, batch))
    flops = 2.0 * rows * columns * inner * times
    moved = float(width) * times * (rows * inner + inner * columns + rows * columns)
    return Kernel(name, flops, moved, rows, columns, inner, times)


def moving(name: str, num_bytes: float) -> Kernel:
    """An operation that is bound by memory: norms, dropout, activations, additions."""
    return Kernel(name, 0.0, num_bytes)


def gradients_of(kernel: Kernel, width: int) -> tuple[Kernel, Kernel]:
    """The products of backward: the gradient of the input and that of the weight."""
    _, _, _, m, n, k, batch = kernel
    to_input = product(f"{kernel.name} input gradient", m, k, n, width, batch)
    return to_input, product(f"{kernel.name} weight gradient", k, n, m, width, batch)
