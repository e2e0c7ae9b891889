"""A plain DistributedDataParallel script whose one line about Shoal is the name of the backend.

mp.spawn starts a process for each worker; DDP, DistributedSampler and GradScaler are torch's. Only
the collectives are Shoal's: `dist.init_process_group("shoal")` in place of "nccl" or "gloo".

python examples/torch_ddp.py -mode train -workers 2
python examples/torch_ddp.py -mode test
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shoal  # registers the backend; an installed Shoal needs no import


def init_ddp(rank: int) -> torch.device:
    os.environ["RANK"] = str(rank)
    dist.init_process_group(backend="shoal", init_method="env://")
    if torch.cuda.device_count() >= dist.get_world_size():
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device("cpu")


def reduce_tensor(tensor: Tensor) -> Tensor:
    """The mean over all processes."""
    mean = tensor.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    return mean / dist.get_world_size()


def get_ddp_generator(seed: int = 3407) -> torch.Generator:
    """Another seed in each process, for augmentation."""
    return torch.Generator().manual_seed(seed + dist.get_rank())


def data_of(seed: int) -> TensorDataset:
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))


def train(rank: int, options: argparse.Namespace) -> None:
    device = init_ddp(rank)
    torch.manual_seed(0)
    model = DDP(new_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    sampler = DistributedSampler(data := data_of(seed=1))
    generator = get_ddp_generator()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # another order of samples in every epoch
        for x, y in DataLoader(data, batch_size=32, sampler=sampler):
            noisy = x + 0.01 * torch.randn(x.shape, generator=generator)
            optimizer.zero_grad()
            with torch.autocast(device.type, enabled=scaler.is_enabled()):
                loss = nn.functional.cross_entropy(model(noisy.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        mean = reduce_tensor(loss.detach())
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), options.file)
    dist.destroy_process_group()


def test(rank: int, options: argparse.Namespace) -> None:
    device = init_ddp(rank)
    model = new_model().to(device)
    model.load_state_dict(torch.load(options.file, weights_only=True))
    sampler = DistributedSampler(data := data_of(seed=2), shuffle=False)
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=64, sampler=sampler):
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    share = reduce_tensor(right / len(sampler))
    if rank == 0:
        print(f"accuracy {share:.1%}")
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-mode", choices=["train", "test"], default="train")
    parser.add_argument("-workers", type=int, default=2)
    parser.add_argument("-epochs", type=int, default=3)
    parser.add_argument("-file", default="ddp.pt")
    options = parser.parse_args()
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(free_port())
    os.environ["WORLD_SIZE"] = str(options.workers)
    start = time.perf_counter()
    mp.spawn({"train": train, "test": test}[options.mode], args=(options,), nprocs=options.workers)
    print(f"shoal {shoal.__version__}: {time.perf_counter() - start:.2f} seconds")
