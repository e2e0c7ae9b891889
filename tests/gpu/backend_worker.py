"""One of two ranks of backend "shoal" that share a GPU: `python -m tests.gpu.backend_worker …`.

RANK SIZE FOLDER [DEVICE]; runs every case and leaves what went wrong in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal

SIZE = 2
CASES: dict[str, Callable[[int, str], None]] = {}


def case(body: Callable[[int, str], None]) -> Callable[[int, str], None]:
    CASES[body.__name__] = body
    return body


def full(rank: float, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((3, 5), rank + 1, dtype=dtype, device=device)


@case
def all_reduce(rank: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        dist.all_reduce(data := full(rank, device, dtype))
        assert torch.equal(data, full(2, device, dtype))
    dist.all_reduce(turned := full(rank, device).t(), dist.ReduceOp.MAX)
    assert torch.equal(turned, full(1, device).t())


@case
def asynchronous_on_a_stream_and_with_a_future(rank: int, device: str) -> None:
    stream = torch.cuda.Stream() if device == "cuda" else None
    with torch.cuda.stream(stream):
        big = torch.ones(1_000_000, device=device)
        for _ in range(20):
            big = big * 1.5 / 1.5
        work = dist.all_reduce(big, async_op=True)
        assert work is not None
        work.wait()
        doubled = big * 2
    assert float(doubled.min()) == float(doubled.max()) == 4.0
    work = dist.all_reduce(data := full(rank, device), async_op=True)
    assert work is not None and torch.equal(work.get_future().wait()[0], data)
    assert float(data[0, 0]) == 3.0


@case
def collectives_of_pieces(rank: int, device: str) -> None:
    for root in range(SIZE):
        dist.broadcast(data := full(rank, device), root)
        assert torch.equal(data, full(root, device))
    pieces = [torch.zeros(3, 5, device=device) for _ in range(SIZE)]
    whole = torch.zeros(SIZE * 3, 5, device=device)
    dist.all_gather(pieces, full(rank, device))
    dist.all_gather_into_tensor(whole, full(rank, device))
    wanted = torch.cat([full(0, device), full(1, device)])
    assert torch.equal(whole, wanted) and torch.equal(torch.cat(pieces), wanted)
    out = torch.zeros(3, 5, device=device)
    pieces = [full(rank, device), full(rank, device) * 10]
    for reduce in (
        lambda: dist.reduce_scatter(out, pieces),
        lambda: dist.reduce_scatter_tensor(out, torch.cat(pieces)),
    ):
        reduce()
        assert torch.equal(out, full(29 if rank else 2, device))
    dist.reduce(data := full(rank, device), 1)
    assert torch.equal(data, full(2 if rank else 0, device))
    dist.gather(full(rank, device), pieces if rank == 0 else None, 0)
    assert rank or torch.equal(pieces[1], full(1, device))
    dist.scatter(data, [full(4, device), full(5, device)] if rank == 0 else None, 0)
    assert torch.equal(data, full(4 + rank, device))
    swapped = torch.empty(SIZE, device=device)
    dist.all_to_all_single(swapped, torch.tensor([10.0, 20.0], device=device) + rank)
    assert swapped.tolist() == [10.0 + 10 * rank, 11.0 + 10 * rank]
    ranks: list[int] = [-1, -1]
    dist.all_gather_object(ranks, rank)
    assert ranks == [0, 1]


@case
def send_and_recv(rank: int, device: str) -> None:
    into = torch.zeros(300_000, device=device)
    data = torch.full_like(into, rank + 1.0)
    for work in (dist.isend(data, 1 - rank, tag=3), dist.irecv(into, 1 - rank, tag=3)):
        assert work is not None
        work.wait()
    assert float(into.min()) == float(into.max()) == 2.0 - rank
    if rank:
        dist.send(full(7, device), 0)
    else:
        assert dist.recv(few := torch.zeros(3, 5, device=device)) == 1
        assert torch.equal(few, full(7, device))


@case
def distributed_data_parallel(rank: int, device: str) -> None:
    def trained(wrap: Callable[[nn.Module], nn.Module], data: Tensor) -> Tensor:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        return next(iter(model.parameters())).detach()

    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(device)
    wrapped = trained(nn.parallel.DistributedDataParallel, data[rank * 4 : rank * 4 + 4])
    torch.testing.assert_close(wrapped, trained(lambda model: model, data))


def main(rank: int, size: int, folder: Path, device: str = "cuda") -> None:
    torch.set_num_threads(1)
    shoal.register_backend()
    dist.init_process_group(
        "shoal", init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    report: dict[str, str | None] = {}
    for name, body in CASES.items():
        try:
            body(rank, device)
            report[name] = None
        except Exception:
            report[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
