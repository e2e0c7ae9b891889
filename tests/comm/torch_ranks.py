"""Ranks of torch.distributed as forks of the test."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch


def forked_ranks(main: Callable[[int], Any], size: int, timeout_s: float = 120.0) -> list[Any]:
    """What `main(rank)` gives in a process of its own; None of a process that is killed."""
    context = torch.multiprocessing.get_context("fork")
    pairs = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_answer, args=(main, rank, pairs[rank][1])) for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        return [_received(ours, rank, timeout_s) for rank, (ours, _) in enumerate(pairs)]
    finally:
        for process in processes:
            process.join(60)
            process.kill()
            process.join()


def _answer(main: Callable[[int], Any], rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, main(rank)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _received(pipe: Any, rank: int, timeout_s: float) -> Any:
    assert pipe.poll(timeout_s), f"rank {rank} does not answer"
    try:
        ended_well, found = pipe.recv()
    except EOFError:
        return None
    assert ended_well, found
    return found
