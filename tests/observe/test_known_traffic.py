"""Shares and bytes of a trace against a count of one's own: layers that sleep, known sizes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shoal.observe.time_shares import all_shares
from shoal.observe.timeline import steps_of
from shoal.runtime.trace import Span, Trace, from_chrome
from tests.scripts import script, shoal

STEPS, BATCH, WIDTH = 4, 8, 16
SLEEP_S = 0.004  # of each of two layers, in each forward
GRADIENTS = 4 * (WIDTH * 32 + 32 * WIDTH) * 2  # bytes: two pairs of layers
FLAGS = 64  # loss, count and flags, beside the gradients
ACTIVATIONS = 4 * WIDTH * BATCH

SLEEPS = script(f"""
import time

class Sleeps(nn.Module):
    def forward(self, x):
        time.sleep({SLEEP_S})
        return x

def pair():
    yield from (Sleeps(), nn.Linear({WIDTH}, 32, bias=False))
    yield from (nn.Tanh(), nn.Linear(32, {WIDTH}, bias=False))

def train(job):
    torch.manual_seed(0)
    inputs, labels = torch.randn(32, {WIDTH}), torch.randint(0, {WIDTH}, (32,))
    step = job.step(nn.Sequential(*pair(), *pair()), loss, optimizer=sgd)
    for batch in job.batches(TensorDataset(inputs, labels), batch_size={BATCH}):
        step(batch)
""")


def sent(spans: list[Span]) -> Counter[tuple[str, int]]:
    """How often each number of bytes was sent, by kind, after the first step, which checks."""
    steps = steps_of(spans)
    inside = [s for s in spans if steps[2][0] <= s.start_ns < steps[STEPS][1]]
    return Counter((span.kind, span.bytes) for span in inside if span.bytes >= 128)


def seconds(trace: Trace, rank: int, kind: str) -> float:
    return sum(s.end_ns - s.start_ns for s in trace[rank] if s.kind == kind) / 1e9


@pytest.mark.whole
@pytest.mark.parametrize(
    ("strategy", "each_step"),
    [
        ("ddp", {("reduce", GRADIENTS + FLAGS): 1}),  # 2V(p-1)/p = V on two ranks
        ('ddp(algorithm="ring")', {("reduce", GRADIENTS + FLAGS): 1}),
        ("ps", {("push", GRADIENTS): 1}),
        ('ps(mode="async")', {("push", GRADIENTS): 1}),
        ("pp(2)", {("send", ACTIVATIONS // 4): 4}),  # four micro-batches
        ("tp(2)", {("reduce", ACTIVATIONS): 3}),  # two forward; backward at the second pair
    ],
)
def test_sleeps_are_computing_and_bytes_are_those_of_the_tensors(
    tmp_path: Path, strategy: str, each_step: dict[tuple[str, int], int]
) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    words = ("run", "-n", "2", "-s", strategy, "--slow", "1:3x", "--trace", "t.json", "train.py")
    done = shoal(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = from_chrome(tmp_path / "t.json")
    for rank in (0, 1):
        counted = {key: count for key, count in sent(trace[rank]).items() if key[0] != "gather"}
        assert counted == {key: count * (STEPS - 1) for key, count in each_step.items()}
    shares = all_shares(trace)
    forwards = 4 if strategy == "pp(2)" else 2  # of micro-batches; a rank has all, or a half
    slept_s = 2 * STEPS * SLEEP_S * forwards
    assert sum(seconds(trace, rank, "forward") for rank in (0, 1)) >= slept_s
    assert sum(share.seconds * share.computing for share in shares.values()) >= slept_s
    assert shares[0].injected == 0 < shares[1].injected
    assert shares[1].seconds * shares[1].injected == pytest.approx(seconds(trace, 1, "injected"))
    if "async" not in strategy:
        assert shares[0].waited_for[1] > 0
    if "ps" in strategy:
        pulls = [s.bytes for s in trace["server 0"] if s.kind == "pull" and s.detail == "PULL"]
        assert min(pulls) >= GRADIENTS  # the weights
