"""On a machine with a CUDA GPU: precisions, NCCL, and workers and servers that share one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.comm.transport.shm.segment import is_built
from tests.devices import NUM_GPUS
from tests.gpu.backend_worker import CASES, SIZE
from tests.processes import findings
from tests.scripts import json_of, script, shoal

pytestmark = pytest.mark.gpu

BACKEND = script("""
import torch.distributed as dist

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20):
        value = step(batch)
    job.print(dist.get_backend(), job.device, type(job.group.executor).__name__, float(value))
""")


def run_gpt(tmp_path: Path, *args: str) -> list[float]:
    size = ["--size", "tiny", "--steps", "40"]
    done = shoal("run", "--device", "cuda", "gpt", *size, *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "loss" in line and "step" in line]
    return [float(line[line.index("loss") + 1]) for line in lines]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gpt_learns_alone_in_every_precision(tmp_path: Path, precision: str) -> None:
    losses = run_gpt(tmp_path, "--precision", precision)
    assert losses[-1] < losses[0] - 0.5


def test_one_worker_under_ddp_goes_over_nccl(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BACKEND)
    done = shoal("run", "-n", "1", "-s", "ddp", "train.py", cwd=tmp_path)
    assert done.stdout.split()[:3] == ["nccl", "cuda:0", "Nccl"], done.stderr


def test_workers_that_share_a_gpu_go_through_the_hosts_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BACKEND)
    workers = str(NUM_GPUS + 1)
    done = shoal("run", "-n", workers, "-s", "ddp", "train.py", cwd=tmp_path)
    words = done.stdout.removeprefix("[0] ").split()[:3]
    assert words == ["gloo", "cuda:0", "SharedMemory" if is_built() else "Torch"], done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_verify_passes(tmp_path: Path, workers: str, precision: str) -> None:
    words = f"verify -n {workers} -s ddp --device cuda --steps 10 --json gpt"
    size = ("--size", "tiny", "--precision", precision)
    done = shoal(*words.split(), *size, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    print(json_of(done))


def test_digits_with_batchnorm_verify_on_two_workers_that_share_a_gpu(tmp_path: Path) -> None:
    done = shoal("verify", "-n", "2", "--device", "cuda", "--json", "digits", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gossip_between_workers_that_share_a_gpu(tmp_path: Path, mode: str) -> None:
    (tmp_path / "train.py").write_text(BACKEND)
    workers = str(max(4, NUM_GPUS + 1))
    done = shoal("run", "-n", workers, "-s", f'gossip(mode="{mode}")', "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cuda:0" in done.stdout


SCRIPT = script("""
def train(job):
    adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    step = job.step(model(), loss, optimizer=adamw, clip_norm=0.5)
    for batch in job.batches(data, batch_size=20, epochs=3):
        value = step(batch)
    job.print("loss", float(value))
""")


def final_loss(tmp_path: Path, *words: str) -> float:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = shoal("run", *words, "--device", "cuda", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.parametrize("placement", ["rank0", "workers"])
@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_workers_that_share_a_gpu_with_servers_equal_one_device(
    tmp_path: Path, placement: str, workers: str
) -> None:
    alone = final_loss(tmp_path, "-n", "1", "-s", "single")
    strategy = f'ps(placement="{placement}", on="cuda")'
    together = final_loss(tmp_path, "-n", workers, "-s", strategy)
    assert together == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("rule", ["quorum=0.5", "staleness=2", 'mode="async"'])
def test_relaxed_rules_train_on_a_gpu(tmp_path: Path, rule: str) -> None:
    strategy = f'ps({rule}, placement="rank0", on="cuda")'
    assert final_loss(tmp_path, "-n", "2", "-s", strategy) < 5.0


def test_pushes_of_workers_on_the_gpu_of_the_server_do_not_pass_through_the_host(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("-n", "2", "-s", 'ps(placement="rank0", on="cuda")', "--device", "cuda")
    done = shoal("run", *words, "train.py", cwd=tmp_path)
    assert "gradients and weights by memory of the GPU" in done.stderr


def test_a_worker_on_a_gpu_that_is_killed_comes_back(tmp_path: Path) -> None:
    words = ("-s", 'ps(mode="async", placement="rank0", on="cuda")', "--kill", "1@5")
    assert final_loss(tmp_path, "-n", "3", *words, "--restart", "1") < 5.0


GRAPHS = script("""
def train(job):
    def losses(compile):
        step = job.step(model(), loss, optimizer=sgd, compile=compile)
        kept = [step(data[n : n + 20]) for n in range(0, 100, 20)]
        return [float(value) for value in kept], job.evaluate(loss, data, batch_size=20)
    plain, evaluated = losses(False)
    found, of_graphs = losses("reduce-overhead")
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4)
    assert abs(evaluated - of_graphs) < 1e-3, (evaluated, of_graphs)
    job.print("equal")
""")


@pytest.mark.parametrize(("workers", "strategy"), [("1", "single"), ("2", "ddp")])
def test_cuda_graphs_equal_the_plain_model(tmp_path: Path, workers: str, strategy: str) -> None:
    """Losses are kept until the last step: no replay writes into them."""
    (tmp_path / "train.py").write_text(GRAPHS)
    done = shoal("run", "-n", workers, "-s", strategy, "--device", "cuda", "train.py", cwd=tmp_path)
    assert "equal" in done.stdout and done.returncode == 0, done.stderr


NAN_AT_4 = script("""
from pathlib import Path

def train(job):
    step = job.step(model(), loss, optimizer=sgd, on_nan=sys.argv[1])
    x, y = data[:20]
    for number in range(1, 8):
        step((x * float("nan") if number == 4 else x, y))
        if number < 4:
            job.save("kept")
    weights = step.flat.data.isfinite().all().item()
    job.print(job.steps, weights)
""")


@pytest.mark.parametrize(
    ("on_nan", "status", "says"),
    [("stop", 1, "is not a finite number"), ("skip", 0, "7 True"), ("go on", 0, "7 False")],
)
def test_a_loss_of_nan(tmp_path: Path, on_nan: str, status: int, says: str) -> None:
    (tmp_path / "train.py").write_text(NAN_AT_4)
    words = ("run", "-n", "2", "-s", "ddp", "--device", "cuda", "train.py", on_nan)
    done = shoal(*words, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr
    assert json.loads((tmp_path / "kept" / "manifest.json").read_text())["steps"] == 3


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What each rank of one world of processes reports; they have all ended."""
    folder = tmp_path_factory.mktemp("shoal")
    return findings("tests.gpu.backend_worker", SIZE, folder, timeout_s=100)


@pytest.mark.skipif(not is_built(), reason="built without a compiler")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_that_share_a_gpu(reports: list[dict[str, str | None]], case: str) -> None:
    for report in reports:
        assert report[case] is None, report[case]


WAITS = script("""
def train(job):
    inputs = torch.randn(20, 6, device=job.device)
    targets = torch.randint(3, (20,), device=job.device)
    batches = [(inputs, targets)] * 8
    step = job.step(model(), loss, optimizer=sgd)
    for number, batch in enumerate(job.batches(batches)):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        step(batch)
    torch.cuda.set_sync_debug_mode("default")
    own = model()
    own, optimizer = job.setup(own, torch.optim.AdamW(own.parameters(), fused=True))
    for number, (x, y) in enumerate(job.batches(batches)):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        optimizer.zero_grad()
        job.backward(loss(own(x), y), count=len(x))
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
""")


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero(1)"])
def test_no_step_of_one_worker_waits_for_the_gpu(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    done = shoal("run", "-n", "1", "-s", strategy, "--device", "cuda", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
