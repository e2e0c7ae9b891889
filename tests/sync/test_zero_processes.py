"""zero in processes: against FSDP2, and under a memory limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.products import few_or_all
from tests.scripts import script, shoal, started

# the same model, batches and optimizer under zero(2) and under FSDP2, in the same processes
AGAINST_FSDP = script("""
import json
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def make():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    return nn.Sequential(block(), block(), nn.LayerNorm(16), nn.Linear(16, 5))

g = torch.Generator().manual_seed(1)
batches = [(torch.randn(8, 16, generator=g), torch.randint(0, 5, (8,), generator=g))
           for _ in range(12)]
adamw = partial(torch.optim.AdamW, lr=1e-2)

def train(job):
    step = job.step(make(), loss, optimizer=adamw)
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
        value = loss(model(x[half]), y[half])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = value.detach().clone()
        dist.all_reduce(total)
        theirs.append(float(total) / job.size)
    job.print(json.dumps([ours, theirs]))
""")

# 128 MB of parameters, built on the meta device; MEGABYTES is how much may be taken from there on
LARGE = script("""
import json, resource

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
""")


def last_json(text: str) -> list[object]:
    found = json.loads(text.strip().splitlines()[-1].removeprefix("[0] "))
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("strategy", [pytest.param("zero(2)", marks=pytest.mark.whole), "zero(3)"])
def test_losses_are_those_of_fsdp2(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(AGAINST_FSDP)
    done = shoal("run", "-n", "2", "-s", strategy, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = last_json(done.stdout)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert len(ours) == 12 and ours[-1] < ours[0]  # type: ignore[arg-type, index]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
@pytest.mark.whole
def test_a_model_too_large_for_one_worker_trains_on_two(tmp_path: Path) -> None:
    """AdamW alone takes 512 MB (parameters, gradients, state); each of two takes half of that."""
    (tmp_path / "train.py").write_text(LARGE)
    # without reserved arenas, and without what a fork inherits: the limit counts what is used
    env = {"MIMALLOC_ARENA_RESERVE": "0", "MIMALLOC_PURGE_DELAY": "0"}
    alone = shoal("run", "train.py", cwd=tmp_path, **env)
    assert alone.returncode == 0, alone.stderr
    env["MEGABYTES"] = "440"
    refused = started("run", "train.py", cwd=tmp_path, **env)
    assert refused.returncode == 1 and "memory" in refused.stderr.splitlines()[-1]
    for strategy in few_or_all(["zero(3)"], ["zero(3)", "pp(2)"]):
        split = started("run", "-n", "2", "-s", strategy, "train.py", cwd=tmp_path, **env)
        assert split.returncode == 0, split.stderr
        assert last_json(split.stdout) == pytest.approx(last_json(alone.stdout), abs=1e-5)
