"""One or several operations of a group as a work of torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame

from shoal.comm.executors.hierarchical.point_to_point import Message
from shoal.comm.work_queue import QueuedWork

Class = TypeVar("Class", bound=type)


def not_compiled(cls: Class) -> Class:
    """A class whose methods, and all that they call, run as they are under torch.compile."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, strategy)
    return cls


@not_compiled
class BackendWork(dist.Work):
    """One or several operations as a torch Work. Messages have no future, as with Gloo."""

    def __init__(self, works: Sequence[Any], tensors: Any):
        super().__init__()
        self._works: Sequence[QueuedWork | Message] = works
        self._tensors = tensors
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout.total_seconds() > 0:
            self._wait_until(timeout.total_seconds())
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.poll() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        errors = [work.error for work in self._works if isinstance(work, QueuedWork) and work.error]
        return errors[0] if errors else None

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def _source_rank(self) -> int:
        last = self._works[-1]
        return -1 if isinstance(last, QueuedWork) else last.source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future(devices=_gpus_of(self._tensors))
            self._queued_work().when_done(self._fulfil)
        return self._future

    def _queued_work(self) -> QueuedWork:
        last = self._works[-1]
        if not isinstance(last, QueuedWork):
            raise RuntimeError("point-to-point operations have no future: wait for the work")
        return last  # those before it are done when it is

    def _fulfil(self) -> None:
        assert self._future is not None
        error = self.exception()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)

    def _wait_until(self, timeout_s: float) -> None:
        last = self._works[-1]
        if not isinstance(last, QueuedWork):
            last.wait(timeout_s)
            return
        arrived = threading.Event()
        self._queued_work().when_done(arrived.set)
        if not arrived.wait(timeout_s):
            raise RuntimeError(f"Timed out waiting {timeout_s * 1e3:.0f}ms for an operation")


def _gpus_of(tensors: Any) -> list[Any]:
    """A future has to know the GPUs of its value."""
    if isinstance(tensors, Tensor):
        return [tensors.device] if tensors.is_cuda else []
    return list(dict.fromkeys(gpu for each in tensors for gpu in _gpus_of(each)))
