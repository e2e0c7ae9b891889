"""A run that is preempted and goes on has the losses and weights, to the bit, of one that is not.

With all that has a state: dropout, shuffled samples from loader processes, a schedule of the
learning rate, accumulation, clipping, bf16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts import HEAD, shoal

SCRIPT = (
    HEAD
    + """
import signal

def dropping():
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))]
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 3))

def train(job):
    step = job.step(
        dropping(),
        loss,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        accumulate=2,
        clip_norm=1.0,
        precision="bf16",
    )
    for batch in job.batches(data, batch_size=20, epochs=3, loaders=2):
        value = float(step(batch))
        if job.rank == 0:
            with open("losses", "a") as file:
                file.write(f"{job.steps} {value!r}\\n")
            if str(job.steps) in sys.argv[2:] and not os.path.exists(f"struck-{job.steps}"):
                open(f"struck-{job.steps}", "w").close()
                os.kill(os.getppid(), getattr(signal, sys.argv[1]))
    job.save("final")

if __name__ == "__main__":
    shoal.run(train)
"""
)


def run_to_end(folder: Path, strategy: str, *args: str) -> int:
    """How often it was started."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    words = ["run", "-n", "2", "-s", strategy, "--checkpoint", "saved", "train.py", *args]
    for start in range(1, 5):
        done = shoal(*words, cwd=folder)
        if done.returncode != 143:
            assert done.returncode == 0, done.stderr
            return start
    raise AssertionError(done.stderr)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of the model and the optimizer."""
    files = sorted((folder / "final").glob("*.safetensors"))
    read = [(file.name.partition("-")[0], load_file(file)) for file in files]
    return {f"{kind}.{name}": value for kind, found in read for name, value in found.items()}


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "zero(2)", "ps", "pp(2)", "tp(2)"])
def test_a_preempted_run_has_the_bits_of_an_undisturbed_one(tmp_path: Path, strategy: str) -> None:
    plain, struck = tmp_path / "plain", tmp_path / "struck"
    assert run_to_end(plain, strategy) == 1
    number = "SIGUSR1" if strategy == "ddp" else "SIGTERM"
    assert run_to_end(struck, strategy, number, "4", "11") == 3
    lines = [(folder / "losses").read_text().splitlines() for folder in (plain, struck)]
    assert lines[0] == lines[1] and len(lines[0]) == 18
    expected, found = tensors(plain), tensors(struck)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
