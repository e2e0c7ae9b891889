"""The same parameter server by Ray, by torch.distributed.rpc and by sockets, for `benchmarks ps`.

Sockets exchange the bytes of a round and do nothing with them: no server over TCP is faster. The
others hold the weights in one process. A dense round: two workers give a gradient each, the server
adds them up, takes a step of SGD, and the workers get the new weights. A sparse pull: the rows
of a table that one worker asks for.
"""

from __future__ import annotations

import socket
import threading
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.rpc.functions import async_execution

from shoal.server.shared_memory import bytes_of

LR = 0.1


class Weights:
    """What the server of a peer holds."""

    def __init__(self, numel: int, workers: int, rows: int, dim: int):
        self.weights = torch.zeros(numel)
        self.workers = workers
        self.table = torch.randn(rows, dim)

    def update(self, gradients: list[Tensor]) -> Tensor:
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        self.weights.sub_(total, alpha=LR)
        return self.weights

    def rows(self, ids: Tensor) -> Tensor:
        return self.table[ids]


class RpcServer:
    """Answers the pushes of a round with the new weights, once all have come."""

    def __init__(self, numel: int, workers: int, rows: int, dim: int):
        self._held = Weights(numel, workers, rows, dim)
        self._lock = threading.Lock()
        self._gradients: list[Tensor] = []
        self._next: Any = torch.futures.Future()

    def push_pull(self, gradient: Tensor) -> Any:
        with self._lock:
            self._gradients.append(gradient)
            future = self._next
            if len(self._gradients) == self._held.workers:
                weights = self._held.update(self._gradients)
                self._gradients = []
                self._next = torch.futures.Future()
                future.set_result(weights)
        return future

    def rows(self, ids: Tensor) -> Tensor:
        return self._held.rows(ids)


_rpc_server: RpcServer | None = None


def rpc_open(numel: int, workers: int, rows: int, dim: int) -> None:
    global _rpc_server
    _rpc_server = RpcServer(numel, workers, rows, dim)


@async_execution  # type: ignore[untyped-decorator]
def rpc_round(gradient: Tensor) -> Any:
    assert _rpc_server is not None
    return _rpc_server.push_pull(gradient)


def rpc_rows(ids: Tensor) -> Tensor:
    assert _rpc_server is not None
    return _rpc_server.rows(ids)


class RpcPeer:
    """A worker's view of the RPC server, which is the process named "server"."""

    def __init__(self, rank: int, workers: int, method: str):
        from torch.distributed import rpc as _rpc

        self._rpc = rpc = cast(Any, _rpc)
        options = rpc.TensorPipeRpcBackendOptions(init_method=method)
        rpc.init_rpc(
            f"worker{rank}", rank=rank, world_size=workers + 1, rpc_backend_options=options
        )

    def dense(self, gradient: Tensor) -> Tensor:
        return self._rpc.rpc_sync("server", rpc_round, args=(gradient,))  # type: ignore[no-any-return]

    def sparse(self, ids: Tensor) -> Tensor:
        return self._rpc.rpc_sync("server", rpc_rows, args=(ids,))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._rpc.shutdown()


def serve_rpc(workers: int, method: str, numel: int, rows: int, dim: int) -> None:
    """The server's process: returns when all workers have shut down."""
    from torch.distributed import rpc as _rpc

    rpc: Any = _rpc
    rpc_open(numel, workers, rows, dim)
    options = rpc.TensorPipeRpcBackendOptions(init_method=method)
    rpc.init_rpc("server", rank=workers, world_size=workers + 1, rpc_backend_options=options)
    rpc.shutdown()


def _receive(sock: socket.socket, view: memoryview) -> int:
    """Returns 0 where the other side has closed before."""
    done = 0
    while done < len(view) and (count := sock.recv_into(view[done:])):
        done += count
    return done


def serve_sockets(listener: socket.socket, dense_bytes: int, sparse: tuple[int, int]) -> None:
    """A thread for each connection, whose first byte says what it exchanges."""

    def serve(sock: socket.socket) -> None:
        asked, answered = sparse if sock.recv(1) == b"s" else (dense_bytes, dense_bytes)
        taken = memoryview(bytearray(asked))
        given = bytes(answered)
        while _receive(sock, taken):
            sock.sendall(given)

    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


class SocketPeer:
    """Gives as many bytes as a push or as the ids of a pull, and takes as many as they bring."""

    def __init__(self, port: int, kind: bytes, given: Tensor, taken: Tensor):
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(kind)
        self._given, self._taken = bytes_of(given), bytes_of(taken)

    def exchange(self) -> None:
        self._sock.sendall(self._given)
        _receive(self._sock, self._taken)

    def close(self) -> None:
        self._sock.close()


class RayPeer:
    """Ray's example of a synchronous parameter server; the driver is rank 0's process."""

    def __init__(self, workers: int, numel: int, rows: int, dim: int):
        import ray  # type: ignore[import-not-found, unused-ignore]

        self._ray: Any = ray
        self._ray.init(
            num_cpus=workers + 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=4 << 30,
        )
        server: Any = self._ray.remote(_RayServer)
        worker: Any = self._ray.remote(_RayWorker)
        self._server = server.remote(numel, workers, rows, dim)
        self._workers = [worker.remote(numel) for _ in range(workers)]
        self._weights = self._server.get.remote()

    def dense(self) -> None:
        """One round of all workers, until they have the new weights."""
        gradients = [worker.gradient.remote(self._weights) for worker in self._workers]
        self._weights = self._server.update.remote(*gradients)
        self._ray.wait([self._weights])
        self._ray.get([worker.take.remote(self._weights) for worker in self._workers])

    def sparse(self, ids: Any) -> Any:
        return self._ray.get(self._server.rows.remote(ids))

    def close(self) -> None:
        self._ray.shutdown()


class _RayServer:
    def __init__(self, numel: int, workers: int, rows: int, dim: int):
        torch.set_num_threads(1)
        self._held = Weights(numel, workers, rows, dim)

    def get(self) -> Any:
        return self._held.weights.numpy()

    def update(self, *gradients: Any) -> Any:
        return self._held.update([torch.from_numpy(g) for g in gradients]).numpy()

    def rows(self, ids: Any) -> Any:
        return self._held.rows(torch.from_numpy(ids)).numpy()


class _RayWorker:
    def __init__(self, numel: int):
        torch.set_num_threads(1)
        self._weights = torch.zeros(numel)
        self._gradient = torch.ones(numel).numpy()

    def gradient(self, weights: Any) -> Any:
        return self._gradient

    def take(self, weights: Any) -> None:
        self._weights.copy_(torch.from_numpy(weights))
