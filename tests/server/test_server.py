"""Pushes and pulls against servers in threads, on a GPU, and slowed down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shoal.comm.transport import cuda_ipc
from shoal.errors import PeerLost, RunOver, ShoalError
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.server import shared_memory
from shoal.server.client.client import Client, DeviceExchange
from shoal.server.client.discovery import all_gather_text
from shoal.server.consistency import Rule
from shoal.server.messages import Commit, DeviceAsked
from shoal.server.process import model_host
from shoal.server.protocol import FrameKind
from shoal.sync.ps.plan import ServedOptions, specs_of
from tests.conftest import World
from tests.server.helpers import MODEL, SECRET, client_of, fill, flat_of, servers, weights
from tests.server.replicas.world import push_one_hot, world

ASYNC = Rule(2, asynchronous=True)
ALONE = Rule(1, asynchronous=True)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_push_moves_the_weights_of_all_servers(tcp: bool, count: int) -> None:
    with servers(count, tcp) as found:
        client = client_of(found, 0, Rule(1))
        assert client.shares_memory is not tcp
        assert client.commit(*fill(client, 2.0)).verdict == "admitted"
        moved = weights(client, version=1)
        used = torch.zeros_like(moved, dtype=torch.bool)
        offset = client.specs[0].start
        for spec in client.specs:
            for cut in spec.slices:
                start = cut.start - offset
                used[start : start + torch.Size(cut.shape).numel()] = True
        assert torch.all(moved[used] == -2.0), "SGD with lr 1 on weights that were 0"


@pytest.mark.parametrize("count", [1, 2])
def test_a_part_of_a_model_is_clipped_by_the_norm_of_the_whole(count: int) -> None:
    """Gradients of 2, in 15 and 5 elements: norms of 2√15 and 2√5, and the whole has one of 40."""
    with servers(count) as found:
        client = client_of(found, 0, Rule(1), clip_norm=4.0, norm_from_workers=True)
        seen: list[dict[int, float]] = []

        def tell() -> None:
            seen.append(client.norms())
            client.set_norm(40.0)

        client.commit(*fill(client, 2.0), tell)
        assert seen == [pytest.approx({0: 60**0.5, 1: 20**0.5})]
        moved = weights(client, version=1)
        assert moved[moved != 0].numel() == 20
        torch.testing.assert_close(moved[moved != 0], torch.full((20,), -2.0 * 4.0 / 40.0))


def test_a_norm_whose_answer_was_lost_is_sent_again_and_counts_once() -> None:
    """Seed 1280 of the runs with faults."""
    with servers() as found:
        client = client_of(found, 0, Rule(1), clip_norm=4.0, norm_from_workers=True)

        def tell() -> None:
            client.norms()
            client.set_norm(40.0)
            client.set_norm(1.0)

        client.commit(*fill(client, 2.0), tell)
        client.set_norm(1.0)
        moved = weights(client, version=1)
        torch.testing.assert_close(moved[moved != 0], torch.full((20,), -2.0 * 4.0 / 40.0))


def test_a_norm_that_no_step_waits_for_is_refused() -> None:
    with servers() as found:
        client = client_of(found, 0, Rule(1), clip_norm=4.0, norm_from_workers=True)
        with pytest.raises(ShoalError, match="TOTAL_NORM arrives, but no step waits for it"):
            client.set_norm(1.0)
    with servers() as found:
        client = client_of(found, 0, Rule(1), clip_norm=4.0)
        with pytest.raises(ShoalError, match="do not clip by a norm of the workers"):
            client.norms()


def test_a_worker_that_dies_ends_the_wait_for_its_norm() -> None:
    with servers() as found:
        first, second = (
            client_of(found, rank, Rule(2), clip_norm=4.0, norm_from_workers=True)
            for rank in range(2)
        )
        second_push = fill(second, 1.0)
        with ThreadPoolExecutor(1) as pool:
            first.commit(*fill(first, 1.0))
            waiting = pool.submit(second.commit, *second_push)
            assert first.norms()
            first.close()
            with pytest.raises(PeerLost):
                waiting.result(60)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_push_that_is_sent_again_is_not_applied_again(tcp: bool, count: int) -> None:
    with servers(count, tcp) as found:
        client = client_of(found, 0, ASYNC)
        client_of(found, 1, ASYNC)
        ack = client.commit(*fill(client, 1.0))
        client.settle(ack.position)
        client.wait_settled()
        once = weights(client, version=1)  # another server may update after it has settled
        client.sequence = 0
        assert client.commit(*fill(client, 1.0)).verdict == "again"
        assert torch.equal(weights(client, version=1), once)
        client.settle(client.commit(Commit(1, 0, 1.0), fill(client, 1.0)[1]).position)
        client.wait_settled()
        assert torch.equal(weights(client, version=2), 2 * once)
        report = found[0].models[7].report()
        assert report["sent_again"] == 1
        assert report["workers"]["0"] == {"admitted": 2, "folded": 0, "dropped": 0}


def share_weights(world: World, clients: list[Client]) -> list[bool]:
    return world(2, lambda g: clients[g.rank].share_weights(partial(all_gather_text, g)))


@pytest.mark.parametrize("count", [1, 2])
def test_workers_that_wait_for_each_other_see_the_weights_where_they_are(
    world: World, count: int
) -> None:
    with servers(count) as found:
        clients = [client_of(found, rank, Rule(2)) for rank in range(2)]
        assert all(share_weights(world, clients))
        for client in clients:
            client.commit(*fill(client, 1.0))
        for client in clients:
            weights(client, version=1)  # waits, and copies nothing
            for spec in client.specs:
                for cut in spec.slices:
                    moved = client.inbox[cut.start : cut.start + torch.Size(cut.shape).numel()]
                    assert torch.all(moved == -2.0), "two gradients of 1, SGD with lr 1, from 0"
        assert all(member.sees_weights for member in found[0].models[7].membership.members.values())


def test_weights_are_not_shared_if_one_worker_cannot(world: World) -> None:
    with servers() as unix, servers(tcp=True) as tcp:
        clients = [client_of(unix, 0, Rule(1)), client_of(tcp, 1, Rule(2))]
        assert not any(share_weights(world, clients))


def test_a_push_that_leaves_one_out_is_refused() -> None:
    with servers() as found:
        client = client_of(found, 0, Rule(1, asynchronous=True))
        client.sequence = 4
        with pytest.raises(ShoalError, match="push 5 is out of order: expected 1"):
            client.commit(*fill(client, 1.0))


def test_a_worker_that_dies_ends_a_synchronous_run_for_the_others() -> None:
    with servers() as found, ThreadPoolExecutor(1) as pool:
        client = client_of(found, 0, Rule(2))
        other = client_of(found, 1, Rule(2))
        client.commit(*fill(client, 1.0))
        waiting = pool.submit(weights, client, 1)
        other.close()  # without leaving
        with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
            waiting.result(60)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_leaves_or_dies_lowers_the_quorum(leaves: bool, count: int) -> None:
    with servers(count) as found, ThreadPoolExecutor(1) as pool:
        rule = Rule(2, quorum=2)
        client = client_of(found, 0, rule)
        other = client_of(found, 1, rule)
        client.commit(*fill(client, 1.0))
        waiting = pool.submit(weights, client, 1)
        if leaves:
            other.leave()
        other.close()
        assert torch.any(waiting.result(60) == -1.0)
        assert found[0].models[7].report()["lost"] == ([] if leaves else [1])


def test_the_loss_of_a_server_is_the_loss_of_a_peer_to_a_worker_of_another() -> None:
    """So that the launcher takes it for a consequence."""
    with servers() as found:
        client = client_of(found, 0, Rule(1))
        found[0].models[MODEL].fail("server 1 was lost (Broken pipe)", is_loss=True)
        with pytest.raises(PeerLost, match=r"COMMIT to server 0 \(server 1 was lost"):
            client.commit(*fill(client, 1.0))


def test_a_model_is_forgotten_when_its_workers_have_left() -> None:
    with servers(2) as found:
        for _ in range(3):
            client = client_of(found, 0, Rule(1))
            client.commit(*fill(client, 1.0))
            client.leave()
            client.close()
            assert all(server.wait_idle(60) for server in found)


def test_workers_that_describe_the_model_differently_are_refused() -> None:
    with servers() as found:
        client_of(found, 0, Rule(2))
        with pytest.raises(ShoalError, match="describe it differently"):
            client_of(found, 1, Rule(2, asynchronous=True))


def test_a_worker_whose_server_has_ended_with_the_run_does_not_wait_for_it(tmp_path: Path) -> None:
    with servers() as found:
        pass
    specs = specs_of(flat_of(), [found[0].address], ServedOptions(ASYNC))
    config = RunConfig(incarnation=1, run_dir=RunDir(tmp_path))
    (tmp_path / "finished-0").touch()
    with pytest.raises(RunOver, match="worker 1 came after the others had finished"):
        Client(1, MODEL, [found[0].address], SECRET, specs, config)


# ---- memory on a GPU; here memory of this process stands for it


HERE = torch.device("cpu")


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
        client = client_of(found, 0, ALONE)
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
        plain = client_of(found, 0, ALONE)
        assert plain.shared_memory == "shared memory"
        assert torch.equal(updated(plain), on_gpu)


@pytest.mark.usefixtures("gpu")
def test_a_server_reads_a_push_where_the_worker_has_put_it() -> None:
    with servers() as found:
        client = client_of(found, 0, ALONE)
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
        client = client_of(found, 0, ALONE)
        link = client.links[0]
        with pytest.raises(ShoalError, match="was offered no memory"):
            client.request(link, FrameKind.SHARE_DEVICE, DeviceAsked(is_accepted=True))
    with servers() as found:
        client = client_of(found, 0, ALONE)
        updated(client)
        with pytest.raises(ShoalError, match="after the first push"):
            client.share_device(HERE)


def test_a_handle_of_another_length_is_refused() -> None:
    with pytest.raises(cuda_ipc.CudaIpcError, match="64 bytes, not 3"):
        cuda_ipc.open_handle(torch.device("cuda"), b"abc", 8)


# ---- `--slow server:0:4x`: others see that all it does takes so long


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long threads slept; each look at the clock of a thread finds a second of work."""
    found: list[float] = []
    monkeypatch.setattr(model_host, "busy_s", itertools.count(1.0).__next__)
    own = SimpleNamespace(**{**vars(clock), "sleep": found.append})
    monkeypatch.setattr(model_host, "clock", own)
    return found


@pytest.mark.parametrize("tcp", [False, True])
def test_a_server_is_slow_in_all_that_it_does_before_others_see_it(
    slept_s: list[float], tcp: bool
) -> None:
    with servers(tcp=tcp) as found:
        client = client_of(found, 0, ALONE)
        assert slept_s == []
        found[0].host.slowness.factor = 4.0
        client.commit(*fill(client, 1.0))
        of_push = len(slept_s)
        assert of_push >= 2, "for the update, and for the answer"
        weights(client)
        assert len(slept_s) > of_push


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_is_slow_wherever_it_is_in_its_chain(slept_s: list[float], replica: int) -> None:
    with world(replicas=2) as made:
        client = made.client(0, ALONE)
        made.servers[0, replica].host.slowness.factor = 4.0
        push_one_hot(client, 1, 0)
        made.weights_of(0, replica)
        assert slept_s
