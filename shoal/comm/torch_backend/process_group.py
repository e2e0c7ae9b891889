"""Shoal as a backend of torch.distributed: `dist.init_process_group("shoal")`.

Ranks of one host use shared memory, those of several hosts TCP between the hosts. CUDA tensors
are copied through the host's memory, so several ranks can share a GPU. Installations without the
native part get Gloo instead; a message says so once.

One or several operations of a group as a work of torch.distributed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.comm.call import TORCH_OPS, Op
from shoal.comm.executors.hierarchical.executor import Hierarchical
from shoal.comm.executors.hierarchical.point_to_point import Message, reserved_tag
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.group import Group
from shoal.comm.network import HostNetwork
from shoal.comm.select import share_memory
from shoal.comm.store.authenticated import own_generation
from shoal.comm.transport.shm.messages import ANY_SOURCE
from shoal.comm.transport.transport import Work
from shoal.comm.work_queue import QueuedWork
from shoal.errors import BadInput, PeerLost
from shoal.runtime.config import RunConfig

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


def all_to_all_lists(group: Group, outputs: list[Tensor], inputs: list[Tensor]) -> Work:
    """`inputs[r]` goes to rank r, `outputs[r]` comes from it."""
    if _are_even(group, [*outputs, *inputs]):
        return group.all_to_all(outputs, inputs)
    out = torch.empty(sum(t.numel() for t in outputs), dtype=outputs[0].dtype)
    recv_counts = [t.numel() for t in outputs]
    send_counts = [t.numel() for t in inputs]
    data = torch.cat([t.detach().reshape(-1).cpu() for t in inputs])
    group.all_to_all_uneven(out, data, recv_counts, send_counts).wait()
    for tensor, received in zip(outputs, torch.split(out, recv_counts), strict=True):
        tensor.copy_(received.view(tensor.shape))
    return group.barrier()


def reduce_scatter_lists(group: Group, out: Tensor, inputs: list[Tensor], op: Op) -> Work:
    """`inputs[r]` of all ranks combined at rank r; uneven ones are reduced one by one."""
    if len({tensor.numel() for tensor in inputs}) == 1:
        return group.reduce_scatter(out, inputs, op)
    if len(inputs) != group.size or out.numel() != inputs[group.rank].numel():
        return group.reduce_scatter(out, inputs, op)  # says what is wrong
    with torch.no_grad():
        copies = [piece.clone(memory_format=torch.contiguous_format) for piece in inputs]
        for root, piece in enumerate(copies):
            group.reduce(piece, root, op).wait()
        out.copy_(copies[group.rank].view(out.shape))
    return group.barrier()


def _are_even(group: Group, tensors: list[Tensor]) -> bool:
    """Whether the tensors of all ranks have one size; a rank sees only its own."""
    sizes = [tensor.numel() for tensor in tensors]
    extremes = torch.tensor([max(sizes), -min(sizes)])
    group.all_reduce(extremes, Op.MAX).wait()
    return int(extremes.sum()) == 0


def add_sparse(group: Group, data: Tensor) -> None:
    """`data` becomes the sum; each rank sends as many entries as the fullest has."""
    entries = data.detach().coalesce().cpu()
    longest = torch.tensor([entries.values().shape[0]])
    group.all_reduce(longest, Op.MAX).wait()
    room = int(longest)
    indices = _gathered(group, entries.indices().t(), room)
    values = _gathered(group, entries.values(), room)
    total = torch.sparse_coo_tensor(
        indices.t(), values, entries.shape, dtype=entries.dtype, check_invariants=False
    )
    data.copy_(total.coalesce())


def _gathered(group: Group, rows: Tensor, room: int) -> Tensor:
    """The rows of all ranks, padded with zeros: an entry of value 0 at index 0 adds nothing."""
    padded = rows.new_zeros(room, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = padded.new_empty(group.size * room, *rows.shape[1:])
    group.all_gather(gathered, padded).wait()
    return gathered


_SHORTEST_WAIT_S = 0.001


def monitored_barrier(
    executor: SharedMemory | Hierarchical, number: int, limit_s: float, wait_all_ranks: bool
) -> None:
    """`number` counts the barriers of the group. The texts are those of torch.distributed."""
    tag = reserved_tag(number)
    deadline_s = time.monotonic() + limit_s
    if executor.rank:
        sent = executor.send(torch.zeros(1), 0, tag)
        try:
            executor.recv(torch.zeros(1), 0, tag).wait(limit_s)
            sent.wait(limit_s)
        except PeerLost as error:
            raise RuntimeError(
                f"Rank {executor.rank} successfully reached monitoredBarrier, but received "
                f"errors while waiting for send/recv from rank 0: {error}"
            ) from error
        return
    missing: list[str] = []
    came = {peer: executor.recv(torch.zeros(1), peer, tag) for peer in range(1, executor.size)}
    for peer, message in came.items():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 and not missing:
            raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {limit_s:g} s")
        if missing and not wait_all_ranks:
            break
        try:
            message.wait(max(left_s, _SHORTEST_WAIT_S))
        except PeerLost:
            missing.append(str(peer))
    if missing:
        raise RuntimeError(
            f"{'Ranks' if wait_all_ranks else 'Rank'} {', '.join(missing)} failed to pass "
            f"monitoredBarrier in {limit_s * 1e3:.0f} ms"
        )
    for message in [executor.send(torch.zeros(1), peer, tag) for peer in came]:
        message.wait(limit_s)


_OPS = [(dist.ReduceOp.AVG if op is Op.MEAN else torchs, op) for op, torchs in TORCH_OPS.items()]


def op_of(opts: Any) -> Op:
    if opts is None:
        return Op.SUM
    op = opts.reduceOp
    for known, ours in _OPS:
        if op == known:
            return ours
    members = dist.ReduceOp.RedOpType.__members__.items()
    name = next((name for name, member in members if op == member), str(op))
    raise BadInput(f"the shoal backend has no ReduceOp.{name}")


# torch declares each method with several signatures; it calls the ones that are defined here
# mypy: disable-error-code="override,assignment"


_NO_TIMEOUT = timedelta(0)  # torch has -1 ms for "that of the group"
Tensors = Sequence[Tensor]


def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """What torch calls for `init_process_group("shoal")` and `new_group`, on every member."""
    config = RunConfig.from_environment()  # torch starts this: nothing of Shoal ran before
    network = HostNetwork(config, master=config.environ.get("MASTER_ADDR"))
    timeout_s = timeout.total_seconds()
    ours = own_generation(PrefixStore("shoal", store), rank, size, timeout_s)
    executor = share_memory(PrefixStore("memory", ours), rank, size, timeout_s, network)
    if executor is not None:
        return ShoalProcessGroup(executor, store)
    return dist.ProcessGroupGloo(PrefixStore("gloo", ours), rank, size, timeout)


@not_compiled
class ShoalProcessGroup(dist.ProcessGroup):
    """The collectives of torch.distributed, each one call of a `Group`."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, executor: SharedMemory | Hierarchical, store: Store | None = None):
        super().__init__(executor.rank, executor.size)  # type: ignore[call-arg]
        self.executor = executor
        self.group = Group(executor)
        self._store = store
        self._name = ""
        self._barriers = 0

    def getBackendName(self) -> str:
        return "shoal"

    @property
    def _device_types(self) -> list[torch.device]:
        """torch knows those of its own groups; it asks here whether tensors of a CPU can go."""
        names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]

    def _get_backend(self, device: torch.device) -> ShoalProcessGroup:
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"the shoal backend has no tensors of {device.type}")
        return self

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def get_group_store(self) -> Store | None:
        return self._store

    getStore = get_group_store

    def set_timeout(self, timeout: timedelta) -> None:
        self.executor.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _for(self, opts: Any) -> Group:
        """The group, with the timeout of this call where it has one."""
        if opts is None or (timeout := opts.timeout) <= _NO_TIMEOUT:
            return self.group
        return self.group.with_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        self.group.close()

    abort = shutdown

    def allreduce(self, tensors: Tensors, opts: Any = None) -> BackendWork:
        op = op_of(opts)
        group = self._for(opts)
        return BackendWork([_all_reduce(group, t, op) for t in tensors], list(tensors))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> BackendWork:
        root = 0 if opts is None else opts.rootRank
        group = self._for(opts)
        return BackendWork([group.broadcast(t, root) for t in tensors], list(tensors))

    def reduce(self, tensors: Tensors, opts: Any) -> BackendWork:
        op = op_of(opts)
        group = self._for(opts)
        return BackendWork([group.reduce(t, opts.rootRank, op) for t in tensors], list(tensors))

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> BackendWork:
        return _each(self._for(opts).all_gather, map(list, outputs), inputs, outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> BackendWork:
        """`outputs[r][i]` takes what rank r has as `inputs[i]`."""
        columns = list(zip(*outputs, strict=True))
        return self.allgather(columns, inputs, opts)

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> BackendWork:
        return _each(self._for(opts).all_gather, [output], [data], output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> BackendWork:
        return _each(self._for(opts).all_gather, outputs, inputs, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> BackendWork:
        outs = list(outputs[0]) if outputs else None
        return _each(self._for(opts).gather, [outs], inputs, outputs, opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> BackendWork:
        given = list(inputs[0]) if inputs else None
        return _each(self._for(opts).scatter, outputs, [given], outputs, opts.rootRank)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> BackendWork:
        call = partial(reduce_scatter_lists, self._for(opts))
        return _each(call, outputs, map(list, inputs), outputs, op_of(opts))

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> BackendWork:
        return _each(self._for(opts).reduce_scatter, outputs, inputs, outputs, op_of(opts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> BackendWork:
        work = all_to_all_lists(self._for(opts), list(outputs), list(inputs))
        return BackendWork([work], outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        data: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> BackendWork:
        if not output_splits and not input_splits:
            return BackendWork([self._for(opts).all_to_all(output, data)], output)
        recv_counts = _elements(output, output_splits, self.group.size)
        send_counts = _elements(data, input_splits, self.group.size)
        group = self._for(opts)
        work = group.all_to_all_uneven(output, data, recv_counts, send_counts)
        return BackendWork([work], output)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> BackendWork:
        return BackendWork([self._for(opts).barrier()], [])

    def send(self, tensors: Tensors, dst: int, tag: int) -> BackendWork:
        return BackendWork([self.group.send(tensor, dst, tag) for tensor in tensors], tensors)

    def recv(self, tensors: Tensors, src: int, tag: int) -> BackendWork:
        return BackendWork([self.group.recv(tensor, src, tag) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> BackendWork:
        return self.recv(tensors, ANY_SOURCE, tag)

    recvAnysource = recv_anysource

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names the ranks that did not reach it; rank 0 collects them."""
        self._barriers += 1
        limit_s = self.executor.timeout_s if timeout is None else timeout.total_seconds()
        monitored_barrier(self.executor, self._barriers, limit_s, wait_all_ranks)

    monitoredBarrier: Callable[..., None] = monitored_barrier


def _each(
    call: Callable[..., Work], outs: Iterable[Any], given: Iterable[Any], kept: Any, *options: Any
) -> BackendWork:
    """`call` for each output with its input; `kept` is the result of the work."""
    works = [call(out, data, *options) for out, data in zip(outs, given, strict=True)]
    return BackendWork(works, kept)


def _all_reduce(group: Group, data: Tensor, op: Op) -> Work:
    if not data.is_sparse:
        return group.all_reduce(data, op)
    if op is not Op.SUM:
        raise BadInput(f"sparse tensors can be summed; the shoal backend has no {op.value} of them")
    add_sparse(group, data)
    return group.barrier()


def _elements(data: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Splits count rows of the first dimension; none: equal ones."""
    rows = data.shape[0] if data.dim() else 0
    counts = list(splits) or [rows // size] * size
    if len(counts) != size or sum(counts) != rows:
        raise BadInput(f"splits {counts} do not add up to {rows} rows for {size} ranks")
    per_row = data.numel() // rows if rows else 0
    return [count * per_row for count in counts]
