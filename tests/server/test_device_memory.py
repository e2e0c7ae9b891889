"""Memory on a GPU that workers share with servers; here memory of this process stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.protocol import FrameKind
from shoal.server import shared_memory
from shoal.server.client.client import Client, DeviceExchange
from shoal.server.consistency import Rule
from shoal.server.messages import DeviceAsked
from shoal.transport import cuda_ipc
from tests.server.helpers import client_of, fill, servers, weights

HERE = torch.device("cpu")
ASYNC = Rule(1, asynchronous=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(device: torch.device, num_bytes: int) -> tuple[Tensor, bytes]:
        return torch.zeros(num_bytes, dtype=torch.uint8), bytes(cuda_ipc.HANDLE_BYTES)

    monkeypatch.setattr(cuda_ipc, "device_name", lambda device: "GPU-0")
    monkeypatch.setattr(cuda_ipc, "allocate", allocate)
    monkeypatch.setattr(DeviceExchange, "synchronize", lambda self: None)


@contextmanager
def client_on_device(count: int = 2) -> Iterator[Client]:
    with servers(count) as found:
        client = client_of(found, 0, ASYNC)
        try:
            client.share_device(HERE)
            yield client
        finally:
            client.close()


def updated(client: Client) -> Tensor:
    """The weights after a push of ones: they began at 0, and the learning rate is 1."""
    assert client.commit(*fill(client, 1.0)).verdict == "admitted"
    return weights(client, version=1)


@pytest.mark.usefixtures("gpu")
def test_pushes_and_pulls_on_a_gpu_give_the_weights_of_shared_memory() -> None:
    with client_on_device() as client:
        assert client.shared_memory == "memory of the GPU"
        on_gpu = updated(client)
        assert torch.any(on_gpu == -1.0)
    with servers(2) as found:
        plain = client_of(found, 0, ASYNC)
        assert plain.shared_memory == "shared memory"
        assert torch.equal(updated(plain), on_gpu)


@pytest.mark.usefixtures("gpu")
def test_a_server_reads_a_push_where_the_worker_has_put_it() -> None:
    with servers() as found:
        client = client_of(found, 0, ASYNC)
        client.share_device(HERE)
        (model,) = found[0].host.models.values()
        fill(client, 3.0)
        assert torch.all(model.membership.members[0].pushes.gradients == 3.0)


def test_without_a_common_gpu_pushes_stay_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "device_name", lambda device: "")
    with client_on_device() as client:
        assert client.on_device is None and client.shared_memory == "shared memory"


def test_memory_that_cannot_be_opened_is_not_used(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_handle(device: torch.device, handle: bytes, num_bytes: int) -> Tensor:
        raise cuda_ipc.CudaIpcError("not permitted")

    monkeypatch.setattr(cuda_ipc, "open_handle", open_handle)
    monkeypatch.setattr(shared_memory, "this_process", iter(["one", "another"]).__next__)
    with client_on_device(count=1) as client:
        assert client.on_device is None and client.shared_memory == "shared memory"
        assert torch.any(updated(client) == -1.0)


@pytest.mark.usefixtures("gpu")
def test_memory_is_accepted_only_after_an_offer_and_before_the_first_push() -> None:
    with servers() as found:
        client = client_of(found, 0, ASYNC)
        link = client.links[0]
        with pytest.raises(ShoalError, match="was offered no memory"):
            client.request(link, FrameKind.SHARE_DEVICE, DeviceAsked(is_accepted=True))
    with servers() as found:
        client = client_of(found, 0, ASYNC)
        updated(client)
        with pytest.raises(ShoalError, match="after the first push"):
            client.share_device(HERE)


def test_a_handle_of_another_length_is_refused() -> None:
    with pytest.raises(cuda_ipc.CudaIpcError, match="64 bytes, not 3"):
        cuda_ipc.open_handle(torch.device("cuda"), b"abc", 8)
