"""Scripts about zero, for tests that start processes."""

from __future__ import annotations

# the same model, batches and optimizer under zero(2) and under FSDP2, in the same processes
AGAINST_FSDP = """
from functools import partial
import json, sys, torch, shoal
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

def make():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    return nn.Sequential(block(), block(), nn.LayerNorm(16), nn.Linear(16, 5))

g = torch.Generator().manual_seed(1)
batches = [(torch.randn(8, 16, generator=g), torch.randint(0, 5, (8,), generator=g))
           for _ in range(12)]
adamw = partial(torch.optim.AdamW, lr=1e-2)

def train(job):
    step = job.step(make(), cross_entropy, optimizer=adamw)
    ours = [float(step(batch)) for batch in job.batches(batches)]
    model = make()
    mesh = init_device_mesh("cpu", (job.size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    theirs = []
    for x, y in batches:
        half = slice(job.rank * 4, job.rank * 4 + 4)
        loss = cross_entropy(model(x[half]), y[half])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        theirs.append(float(total) / job.size)
    job.print(json.dumps([ours, theirs]))

if __name__ == "__main__":
    shoal.run(train)
"""

# 128 MB of parameters, built on the meta device; MEGABYTES is how much may be taken from there on
LARGE = """
from functools import partial
import json, os, resource, torch, shoal
from torch import nn

LIMIT = int(os.environ.get("MEGABYTES", "0"))

def limit_memory():
    spare = nn.Parameter(torch.zeros(1))
    spare.grad = torch.zeros(1)
    torch.optim.AdamW([spare]).step()  # imports much at its first use
    for line in open("/proc/self/status"):
        if line.startswith("VmData"):
            now = int(line.split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + (LIMIT << 20),) * 2)

g = torch.Generator().manual_seed(1)
batch = (torch.randn(4, 1000, generator=g), torch.randn(4, 1000, generator=g))

def train(job):
    if LIMIT:
        limit_memory()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1000, 1000, bias=i % 2 == 0) for i in range(32)))
    step = job.step(model, nn.functional.mse_loss, optimizer=partial(torch.optim.AdamW, lr=1e-4))
    job.print(json.dumps([float(step(b)) for b in job.batches([batch] * 2)]))

if __name__ == "__main__":
    shoal.run(train)
"""
