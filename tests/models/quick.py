"""A cell of the table in seconds: ranks are threads of one forked process, in double precision.

`shoal verify` trains six times; this trains 3 steps by SGD beside one worker and compares every
tensor with what the steps have changed. It finds what is wrong or crashes, not what processes do.
"""

from __future__ import annotations

import math
import os
import select
import signal
import traceback
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput, NotBuilt, StrategyError
from shoal.observe.capture import grouped_mm, switch_off_dropout
from shoal.runtime.pytree import map_tensors
from tests.conftest import run_world
from tests.models.catalog import CATALOG
from tests.models.zoo import Entry
from tests.splitting import train

SGD = partial(torch.optim.SGD, lr=1e-2)
TOLERANCE = 1e-5  # of an update: parts of many models compute in float32
STEPS = 3
BATCH = 8


def run_forked(model: str, strategy: str, workers: int, timeout_s: float) -> tuple[str, str]:
    """The verdict and its sentence; a cell that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, "\0".join(compare(model, strategy, workers)).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], timeout_s)
    if not ready:
        os.kill(child, signal.SIGKILL)
    text = os.read(reader, 65536).decode(errors="replace") if ready else "HANG\0"
    os.close(reader)
    os.waitpid(child, 0)
    verdict, _, sentence = (text or "CRASH\0the process has ended").partition("\0")
    return verdict, sentence


def compare(model: str, strategy: str, workers: int) -> tuple[str, str]:
    torch.set_num_threads(1)
    torch._grouped_mm = grouped_mm  # in this process alone: torch's refuses double precision
    entry = CATALOG[model]
    strategy = 'ps(placement="rank0")' if strategy == "ps" else strategy
    try:
        return _compare(entry, strategy, workers)
    except ModuleNotFoundError as missing:
        return "not installed", str(missing)
    except (BadInput, NotBuilt, StrategyError) as refusal:
        return "refused", str(refusal)
    except Exception as error:  # that is the verdict
        return "CRASH", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"


def _compare(entry: Entry, strategy: str, workers: int) -> tuple[str, str]:
    models = [_built(entry) for _ in range(workers + 1)]
    start = {name: t.clone() for name, t in models[0].state_dict().items()}
    data = [_double(pair) for pair in entry.dataset(STEPS * BATCH)]
    losses, alone = train(
        solo_group(), "single", models[-1], data, BATCH, loss=entry.loss, optimizer=SGD
    )

    def rank(group: Any) -> Any:
        model = models[group.rank]
        return train(group, strategy, model, data, BATCH, loss=entry.loss, optimizer=SGD)

    found_losses, found = run_world(workers, rank)[0]
    if not all(torch.isfinite(torch.tensor(losses))):
        return "nothing shown", "the losses of one worker are not finite"
    aparts = {n: _apart(alone[n], found.get(n), start[n]) for n in alone}
    name, worst = max(aparts.items(), key=lambda item: _nan_last(item[1]))
    gaps = [abs(a - b) for a, b in zip(losses, found_losses, strict=True)]
    apart = max(gaps, key=_nan_last)
    if worst <= TOLERANCE and apart <= TOLERANCE * max(map(abs, losses)):
        return "equal", f"{worst:.1e}"
    return "WRONG", f"{name} by {worst:.2e} of its update; losses by {apart:.2e}"


def _nan_last(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _built(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    model = entry.build().double()
    switch_off_dropout(model)
    return model


def _double(tree: Any) -> Any:
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, tree)


def _apart(alone: Tensor, found: Tensor | None, start: Tensor) -> float:
    if found is None or found.shape != alone.shape:
        return float("inf")
    if not alone.is_floating_point():
        return 0.0 if torch.equal(alone, found) else float("inf")
    size = float((alone - start).abs().max()) + 1e-7 * float(start.abs().max()) + 1e-9
    return float((alone - found).abs().max()) / size if alone.numel() else 0.0
